"""What the plugin expects of vLLM's interface, and how an interface differs from that.

Three kinds of expectation, because they break in different ways:

    overridden  vLLM calls us: a parameter more or less is a call that we do not take
    called      we call vLLM: it must take our arguments and need no others
    read        an attribute, or a member of an enumeration
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_deeplink.versions.interface import Interface

CONNECTOR = "distributed/kv_transfer/kv_connector/v1/base.py:KVConnectorBase_V1"
GROUPS = "distributed/kv_transfer/kv_connector/v1/base.py:SupportsHMA"
METRICS = "distributed/kv_transfer/kv_connector/v1/metrics.py"
FACTORY = "distributed/kv_transfer/kv_connector/factory.py:KVConnectorFactory"
OUTPUT = "v1/core/sched/output.py"
CACHE = "v1/kv_cache_interface.py"
CPU = "v1/attention/backends/cpu_attn.py"

Signatures = Mapping[str, Mapping[str, tuple[str, ...]]]


@dataclass(frozen=True, slots=True)
class Difference:
    """`where` is the class or method, with its module; both sides are as texts for people."""

    where: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.where}: expected {self.expected}, found {self.found}"


@dataclass(frozen=True, slots=True)
class Expected:
    """By class: the methods with their parameters (names alone), and the attributes."""

    overridden: Signatures = field(default_factory=dict)
    called: Signatures = field(default_factory=dict)
    read: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __or__(self, more: Expected) -> Expected:
        read = {place: self.read.get(place, ()) + more.read.get(place, ()) for place in [*self.read, *more.read]}
        return Expected(_joined(self.overridden, more.overridden), _joined(self.called, more.called), read)

    @property
    def places(self) -> list[str]:
        return list(dict.fromkeys([*self.overridden, *self.called, *self.read]))

    @property
    def names(self) -> set[str]:
        """Of all methods and attributes."""
        return {name for kind in (self.overridden, self.called, self.read) for names in kind.values() for name in names}

    def without(self, module: str) -> Expected:
        """What is left where `module` of vLLM is not used."""
        return Expected(
            {place: methods for place, methods in self.overridden.items() if not place.startswith(f"{module}:")},
            {place: methods for place, methods in self.called.items() if not place.startswith(f"{module}:")},
            {place: names for place, names in self.read.items() if not place.startswith(f"{module}:")},
        )

    def differences(self, interface: Interface) -> list[Difference]:
        """Everything in which `interface` is not what is expected; empty when it fits."""
        found: list[Difference] = []
        for place, methods in self.overridden.items():
            for name, parameters in methods.items():
                method = interface.method(place, name)
                theirs = None if method is None else tuple(text.rstrip("=") for text in method.parameters)
                if theirs != parameters:
                    found.append(_difference(place, name, parameters, method))
            if place in interface.classes:
                found += [
                    Difference(f"{place}.{name}", "no more methods that a connector has to have", "an abstract method")
                    for name in sorted(interface.abstract(place) - methods.keys())
                ]
        for place, methods in self.called.items():
            for name, parameters in methods.items():
                method = interface.method(place, name)
                if method is None or not method.accepts(parameters):
                    found.append(_difference(place, name, parameters, method))
        for place, names in self.read.items():
            missing = [name for name in names if not interface.has(place, name)]
            found += [Difference(f"{place}.{name}", "to be there", "nothing") for name in missing]
        return found


def _joined(one: Signatures, other: Signatures) -> Signatures:
    return {place: {**one.get(place, {}), **other.get(place, {})} for place in [*one, *other]}


def _difference(place: str, name: str, parameters: tuple[str, ...], method: object) -> Difference:
    where = f"{place}{'' if place.endswith(':') else '.'}{name}"
    return Difference(where, f"({', '.join(parameters)})", "nothing" if method is None else str(method))


COMMON = Expected(
    overridden={
        CONNECTOR: {
            "__init__": ("vllm_config", "role", "kv_cache_config"),
            "bind_gpu_block_pool": ("gpu_block_pool",),
            "set_xfer_handshake_metadata_pp_aware": ("metadata",),
            "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
            "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
            "build_connector_meta": ("scheduler_output",),
            "update_connector_output": ("connector_output",),
            "request_finished": ("request", "block_ids"),
            "get_kv_connector_stats": (),
            "build_kv_connector_stats": ("data",),
            "build_prom_metrics": ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
            "register_kv_caches": ("kv_caches",),
            "get_handshake_metadata": (),
            "start_load_kv": ("forward_context", "**kwargs"),
            "wait_for_layer_load": ("layer_name",),
            "save_kv_layer": ("layer_name", "kv_layer", "attn_metadata", "**kwargs"),
            "wait_for_save": (),
            "shutdown": (),
        },
        GROUPS: {"request_finished_all_groups": ("request", "block_ids")},
        f"{METRICS}:KVConnectorStats": {"reset": (), "aggregate": ("other",), "reduce": (), "is_empty": ()},
        f"{METRICS}:KVConnectorPromMetrics": {
            "__init__": ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
            "observe": ("transfer_stats_data", "engine_idx"),
        },
    },
    called={
        CONNECTOR: {"_get_connector_metadata": ()},
        FACTORY: {"register_connector": ("name", "module_path", "class_name")},
        "v1/core/kv_cache_manager.py:KVCacheBlocks": {"get_block_ids": ()},
        "v1/core/block_pool.py:BlockPool": {"get_num_free_blocks": ()},
        "config/model.py:ModelConfig": {
            "get_total_num_kv_heads": (),
            "get_total_num_hidden_layers": (),
            "get_vocab_size": (),
        },
        "distributed/parallel_state.py:": {"get_tp_group": (), "get_pp_group": ()},
        "model_executor/models/utils.py:": {"extract_layer_index": ("layer_name",)},
        "engine/arg_utils.py:EngineArgs": {
            "add_cli_args": ("parser",),
            "from_cli_args": ("args",),
            "create_engine_config": (),
        },
        f"{CPU}:CPUAttentionBackendImpl": {"do_kv_cache_update": ("layer", "key", "value", "kv_cache", "slot_mapping")},
    },
    read={
        FACTORY: ("_registry",),
        f"{OUTPUT}:SchedulerOutput": (
            "scheduled_new_reqs",
            "scheduled_cached_reqs",
            "num_scheduled_tokens",
            "preempted_req_ids",
        ),
        f"{OUTPUT}:NewRequestData": ("req_id", "block_ids", "num_computed_tokens"),
        f"{OUTPUT}:CachedRequestData": ("req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens"),
        "v1/request.py:Request": (
            "request_id",
            "status",
            "num_prompt_tokens",
            "prompt_token_ids",
            "prompt_embeds",
            "output_token_ids",
            "cache_salt",
            "lora_request",
            "mm_features",
            "kv_transfer_params",
        ),
        f"{METRICS}:KVConnectorStats": ("data",),
        "v1/outputs.py:KVConnectorOutput": ("finished_sending", "finished_recving"),
        "v1/request.py:RequestStatus": ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"),
        "v1/core/block_pool.py:BlockPool": ("num_gpu_blocks",),
        f"{CACHE}:KVCacheConfig": ("kv_cache_groups",),
        f"{CACHE}:KVCacheGroupSpec": ("layer_names", "kv_cache_spec"),
        f"{CACHE}:FullAttentionSpec": ("block_size",),
        f"{CACHE}:SlidingWindowSpec": ("block_size", "sliding_window"),
        "config/kv_transfer.py:KVTransferConfig": (
            "kv_role",
            "engine_id",
            "kv_load_failure_policy",
            "kv_connector_extra_config",
        ),
    },
)
"""What holds for every version of vLLM that is tested."""
