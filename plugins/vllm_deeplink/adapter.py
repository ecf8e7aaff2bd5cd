"""vLLM's cache tensors and model config, in kvconnector's terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deeplink.errors import ConfigError, LayoutError
from deeplink.kvconnector import rope, weights
from deeplink.kvconnector.cache import Cache
from deeplink.kvconnector.contract import CacheGroup, Contract, Model, Rank
from deeplink.kvconnector.device_cache import host_array
from deeplink.kvconnector.group import Group
from deeplink.kvconnector.layout import Layout
from deeplink.kvconnector.negotiate import FULL, SLIDING
from deeplink.registry import Registry
from vllm_deeplink import layouts, versions

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

DTYPES = ("float32", "bfloat16", "float16")
"""Types of the cache that this plugin reads; the 8-bit ones have scales that it does not look up yet."""

KINDS = {"FullAttentionSpec": FULL, "SlidingWindowSpec": SLIDING}
"""vLLM's kinds of cache and ours."""

ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}


@dataclass(frozen=True, slots=True)
class Place:
    """Where this worker is in its engine: of how many ranks along the tensor-parallel group and the pipeline."""

    tp: int
    tp_size: int
    pp: int

    @property
    def index(self) -> int:
        """Its place among the engine's ranks, as `merged` contracts and tickets count them."""
        return self.pp * self.tp_size + self.tp

    def heads(self, total: int) -> tuple[int, int]:
        """The KV heads it holds: a contiguous shard, or with more ranks than heads a copy of one."""
        first = total * self.tp // self.tp_size
        return first, max(first + 1, total * (self.tp + 1) // self.tp_size)


def check_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuse at start-up, by the name of the setting, what this release cannot hand over."""
    parallel = vllm_config.parallel_config
    for field, value in (
        # On CPU, the only place where this could be tried, vLLM 0.32 itself ends at the first request with a pipeline.
        ("pipeline-parallel-size", parallel.pipeline_parallel_size),
        ("data-parallel-size", parallel.data_parallel_size),
        ("decode-context-parallel-size", parallel.decode_context_parallel_size),
        ("prefill-context-parallel-size", parallel.prefill_context_parallel_size),
    ):
        if value != 1:
            raise ConfigError(
                f"this release hands over only with one of: {field}", field=field, ours=str(value), theirs="1"
            )
    for group in kv_cache_config.kv_cache_groups:
        # Exactly these kinds: others derive from them and mean something else (latent vectors, states, chunks).
        kind = type(group.kv_cache_spec).__name__
        if kind not in KINDS:
            raise ConfigError(
                f"this release hands over the caches of {', '.join(KINDS)} only",
                field="kind of KV cache",
                ours=kind,
                theirs=", ".join(KINDS),
            )
    if vllm_config.speculative_config is not None:
        raise ConfigError(
            "this release does not hand over with speculative decoding", field="speculative-config", theirs="none"
        )


def read_place() -> Place:
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return Place(get_tp_group().rank_in_group, get_tp_group().world_size, get_pp_group().rank_in_group)


def layer_names(group: KVCacheGroupSpec) -> list[str]:
    """The names of a group's layers on this worker, by their numbers."""
    return sorted(group.layer_names, key=_number)


def _number(name: str) -> int:
    from vllm.model_executor.models.utils import extract_layer_index

    number: int = extract_layer_index(name)
    return number


def read_groups(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    tensors: dict[str, torch.Tensor],
    known: Registry[str],
    place: Place,
) -> tuple[Group, ...]:
    """The cache groups with their arrays, from the live tensors and the attention backend's own packing.

    Each tensor is ``[block, head, token, 2 * dim]`` with K and V together; what its strides do not tell, the backend
    declares. Raises LayoutError for anything else.
    """
    named = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
    if set(named) != set(tensors):
        raise LayoutError(f"the cache has layers {sorted(tensors)}, its groups name {sorted(named)}")
    if any(tensor.dim() != 4 for tensor in tensors.values()):
        raise LayoutError("a cache tensor that is not [block, head, token, 2 * dim]", field="shape")
    return tuple(_read_group(vllm_config, group, tensors, known, place) for group in kv_cache_config.kv_cache_groups)


def _read_group(
    vllm_config: VllmConfig,
    group: KVCacheGroupSpec,
    tensors: dict[str, torch.Tensor],
    known: Registry[str],
    place: Place,
) -> Group:
    names, spec = layer_names(group), group.kv_cache_spec
    blocks, heads, block_size, content = tensors[names[0]].shape
    dtype = str(tensors[names[0]].dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise LayoutError(f"a cache of {dtype}; this plugin reads {', '.join(DTYPES)}", field="dtype", theirs=dtype)
    if block_size != spec.block_size:
        raise LayoutError(
            "the attention kernel's blocks are not the scheduler's",
            field="block_size",
            ours=str(spec.block_size),
            theirs=str(block_size),
        )
    total = vllm_config.model_config.get_total_num_kv_heads()
    held = place.heads(total)
    if held[1] - held[0] != heads:
        raise LayoutError(
            f"a cache of {heads} heads on rank {place.tp} of {place.tp_size}, of a model with {total}",
            field="heads",
            ours=str(held[1] - held[0]),
            theirs=str(heads),
        )
    (layout,) = {_declared(vllm_config, name) for name in names}
    text = known.get(layout)
    bound = Layout.parse(text).bind(heads=heads, head_dim=content // 2, block_size=block_size, blocks=blocks)
    shape = (blocks, heads, block_size, content)
    arrays = tuple(host_array(f"layer {name}", tensors[name], shape) for name in names)
    layers = tuple(map(_number, names))
    kind = KINDS[type(spec).__name__]
    window = spec.sliding_window if kind == SLIDING else 0
    stated = CacheGroup(kind, layers, total, content // 2, dtype, block_size, text, window)
    return Group(stated, layers, held, Cache(arrays, bound))


def _declared(vllm_config: VllmConfig, name: str) -> str:
    layer = attention_layer(vllm_config, name)
    return layouts.declared(layer.get_attn_backend().get_name(), versions.current().packing(layer))


def attention_layer(vllm_config: VllmConfig, name: str) -> Any:
    return vllm_config.compilation_config.static_forward_context[name]


def read_model(vllm_config: VllmConfig) -> Model:
    """Model identity, with the weights fingerprint of the checkpoint on disk."""
    model = vllm_config.model_config
    return Model(
        architecture=", ".join(model.architectures),
        layers=model.get_total_num_hidden_layers(),
        vocabulary=model.get_vocab_size(),
        rope=rope.canonical(model.hf_text_config),
        quantization=str(model.quantization or "none"),
        weights=weights.fingerprint(weights.checkpoint(model.model, model.revision)),
    )


def make_contract(
    vllm_config: VllmConfig,
    groups: Sequence[Group],
    place: Place,
    model: Model,
    channel: str,
    transports: dict[str, str],
    casts: tuple[str, ...],
) -> Contract:
    """This worker's: its rank, and of each cache group the layers that it holds."""
    from vllm import __version__
    from vllm.platforms import current_platform

    transfer = vllm_config.kv_transfer_config
    layers = [layer for group in groups for layer in group.layers]
    return Contract(
        engine="vllm",
        engine_version=__version__,
        chip=str(current_platform.device_name or current_platform.device_type),
        role=ROLES[transfer.kv_role],
        epoch=transfer.engine_id,
        model=model,
        groups=tuple(group.spec for group in groups),
        ranks=(
            Rank(
                place.tp,
                place.pp,
                0,
                tuple(group.heads for group in groups),
                (min(layers), max(layers) + 1),
                channel,
                transports,
            ),
        ),
        casts=casts,
    )
