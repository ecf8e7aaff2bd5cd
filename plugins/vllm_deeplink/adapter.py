"""vLLM's cache tensors and model config, in kvconnector's terms. Tested with vLLM 0.32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deeplink.config import KVSection
from deeplink.errors import ConfigError, LayoutError
from deeplink.kvconnector import weights
from deeplink.kvconnector.cache import Cache
from deeplink.kvconnector.contract import CacheGroup, Contract, Model, Rank
from deeplink.kvconnector.convert import storage_dtype
from deeplink.kvconnector.group import Group
from deeplink.kvconnector.layout import Layout
from deeplink.kvconnector.tls import Tls
from deeplink.registry import Registry
from vllm_deeplink import layouts

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

DTYPES = ("float32", "bfloat16", "float16")
"""Types of the cache that this plugin reads; the 8-bit ones have scales that it does not look up yet."""

ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}


def check_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuse at start-up, by the name of the setting, what this release cannot hand over."""
    parallel = vllm_config.parallel_config
    for field, value in (
        ("tensor-parallel-size", parallel.tensor_parallel_size),
        ("pipeline-parallel-size", parallel.pipeline_parallel_size),
        ("data-parallel-size", parallel.data_parallel_size),
        ("number of KV cache groups", len(kv_cache_config.kv_cache_groups)),
    ):
        if value != 1:
            raise ConfigError(
                f"this release hands over only with one of: {field}", field=field, ours=str(value), theirs="1"
            )
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    # Exactly this kind: sliding windows drop blocks, and latent attention has no K and V, but both derive from it.
    if type(spec).__name__ != "FullAttentionSpec":
        raise ConfigError(
            "this release hands over the cache of full attention only",
            field="kind of KV cache",
            ours=type(spec).__name__,
            theirs="FullAttentionSpec",
        )
    if vllm_config.speculative_config is not None:
        raise ConfigError(
            "this release does not hand over with speculative decoding", field="speculative-config", theirs="none"
        )


def read_group(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    tensors: dict[str, torch.Tensor],
    known: Registry[str],
) -> Group:
    """The cache group with its arrays, from the live tensors and the attention backend's own packing.

    Each tensor is ``[block, head, token, 2 * dim]`` with K and V together; what its strides do not tell, the backend
    declares. Raises LayoutError for anything else.
    """
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    names = list(kv_cache_config.kv_cache_groups[0].layer_names)
    if set(names) != set(tensors):
        raise LayoutError(f"the cache has layers {sorted(tensors)}, its group names {sorted(names)}")
    if any(tensor.dim() != 4 for tensor in tensors.values()):
        raise LayoutError("a cache tensor that is not [block, head, token, 2 * dim]", field="shape")
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
    (layout,) = {_declared(vllm_config, name) for name in names}
    text = known.get(layout)
    bound = Layout.parse(text).bind(heads=heads, head_dim=content // 2, block_size=block_size, blocks=blocks)
    arrays = tuple(_flat(name, tensors[name], (blocks, heads, block_size, content), dtype) for name in names)
    layers = tuple(range(len(names)))
    spec = CacheGroup("full", layers, heads, content // 2, dtype, block_size, text)
    return Group(spec, layers, (0, heads), Cache(arrays, bound))


def _declared(vllm_config: VllmConfig, name: str) -> str:
    layer = attention_layer(vllm_config, name)
    return layouts.declared(layer.get_attn_backend().get_name(), getattr(layer, "isa", ""))


def attention_layer(vllm_config: VllmConfig, name: str) -> Any:
    return vllm_config.compilation_config.static_forward_context[name]


def _flat(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    import torch

    if tensor.device.type != "cpu":
        raise LayoutError(f"layer {name} is in {tensor.device} memory; this release reads host memory", field="device")
    if tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise LayoutError(
            f"layer {name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}",
            field="strides",
            ours=f"{shape}, dense",
            theirs=str(tensor.stride()),
        )
    signed = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    flat: np.ndarray[Any, Any] = tensor.view(signed).view(-1).numpy().view(storage_dtype(dtype))
    return flat


def read_model(vllm_config: VllmConfig) -> Model:
    """Model identity, with the weights fingerprint of the checkpoint on disk."""
    model = vllm_config.model_config
    hf = model.hf_text_config
    rope = {
        name: getattr(hf, name)
        for name in ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
        if getattr(hf, name, None) is not None
    }
    return Model(
        architecture=", ".join(model.architectures),
        layers=model.get_total_num_hidden_layers(),
        vocabulary=model.get_vocab_size(),
        rope=json.dumps(rope, sort_keys=True, default=str),
        quantization=str(model.quantization or "none"),
        weights=weights.fingerprint(_folder(model.model, model.revision)),
    )


def _folder(model: str, revision: str | None) -> Path:
    """The checkpoint on disk: a folder, or what the hub client has already downloaded."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, revision=revision, local_files_only=True))


def load_tls(settings: KVSection) -> Tls | None:
    return Tls.load(settings.tls.certificate, settings.tls.key, settings.tls.ca) if settings.tls is not None else None


def make_contract(
    vllm_config: VllmConfig,
    group: CacheGroup,
    model: Model,
    channel: str,
    transports: dict[str, str],
    casts: tuple[str, ...],
) -> Contract:
    from vllm import __version__
    from vllm.platforms import current_platform

    transfer = vllm_config.kv_transfer_config
    return Contract(
        engine="vllm",
        engine_version=__version__,
        chip=str(current_platform.device_name or current_platform.device_type),
        role=ROLES[transfer.kv_role],
        epoch=transfer.engine_id,
        model=model,
        groups=(group,),
        ranks=(Rank(0, 0, 0, ((0, group.heads),), (0, model.layers), channel, transports),),
        casts=casts,
    )
