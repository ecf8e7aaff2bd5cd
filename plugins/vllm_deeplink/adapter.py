"""vLLM's cache tensors and model config, in kvconnector's terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deeplink.errors import LayoutError
from deeplink.kvconnector.caches.cache import Cache
from deeplink.kvconnector.caches.device_cache import host_array, of_tensors
from deeplink.kvconnector.caches.group import Group
from deeplink.kvconnector.contracts import rope, weights
from deeplink.kvconnector.contracts.contract import CacheGroup, Contract, Model, Rank, Scales
from deeplink.kvconnector.contracts.forms import SCHEMES
from deeplink.kvconnector.contracts.negotiate import SLIDING
from deeplink.kvconnector.layouts.layout import Layout
from deeplink.kvconnector.relayout import device
from deeplink.registry import Registry
from vllm_deeplink import layouts, versions
from vllm_deeplink.supported import KINDS

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

DTYPES = ("float32", "bfloat16", "float16")
"""Types of the cache that a tensor says itself."""

FP8 = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""The others are bytes to the tensor, and vLLM's setting says what they mean. Their scales are constants of a layer."""

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
    (dtype,) = {_dtype(vllm_config, name, tensors[name]) for name in names}
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
    (layout,) = {_declared(vllm_config, name, tensors[name]) for name in names}
    text = known.get(layout)
    bound = Layout.parse(text).bind(heads=heads, head_dim=content // 2, block_size=block_size, blocks=blocks)
    if tensors[names[0]].device.type in device.HOST:
        shape = (blocks, heads, block_size, content)
        cache = Cache(tuple(host_array(f"layer {name}", tensors[name], shape) for name in names), bound)
    else:
        cache = of_tensors([tensors[name] for name in names], bound)
    scales = (
        Scales("tensor", tuple(v for name in names for v in _scales(vllm_config, name))) if dtype in SCHEMES else None
    )
    layers = tuple(map(_number, names))
    kind = KINDS[type(spec).__name__]
    window = spec.sliding_window if kind == SLIDING else 0
    stated = CacheGroup(kind, layers, total, content // 2, dtype, block_size, text, window, scales)
    return Group(stated, layers, held, cache)


def _dtype(vllm_config: VllmConfig, name: str, tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    setting = str(attention_layer(vllm_config, name).kv_cache_dtype)
    if dtype in DTYPES:
        return dtype
    if tensor.element_size() != 1 or setting not in FP8:
        raise LayoutError(
            f"layer {name} has a cache of {dtype}, with the setting {setting}",
            field="dtype",
            ours=", ".join([*DTYPES, *FP8]),
            theirs=setting,
        )
    return FP8[setting]


def _scales(vllm_config: VllmConfig, name: str) -> tuple[float, float]:
    """Of K and of V."""
    layer = attention_layer(vllm_config, name)
    return float(layer._k_scale_float), float(layer._v_scale_float)


def _declared(vllm_config: VllmConfig, name: str, tensor: torch.Tensor) -> str:
    layer = attention_layer(vllm_config, name)
    backend = layer.get_attn_backend().get_name()
    if tensor.device.type in device.HOST:
        return layouts.declared(backend, versions.current().packing(layer))
    if not hasattr(layer.impl, "do_kv_cache_update"):
        raise LayoutError(
            f"the attention backend {backend} has no operation of its own that writes to the cache, by which its "
            "layout could be proven",
            field="layout",
            theirs=backend,
            remedy="choose another with --attention-backend",
        )
    return layouts.by_strides(tensor.shape, tensor.stride())


def attention_layer(vllm_config: VllmConfig, name: str) -> Any:
    return vllm_config.compilation_config.static_forward_context[name]


def replica(vllm_config: VllmConfig) -> int:
    """Which of the engine's data-parallel replicas this is. Each has a scheduler, an epoch and a contract of its own,
    and knows only itself, but for this."""
    return int(getattr(vllm_config.parallel_config, "data_parallel_index", 0))


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
                replica(vllm_config),
                tuple(group.heads for group in groups),
                (min(layers), max(layers) + 1),
                channel,
                transports,
            ),
        ),
        casts=casts,
    )
