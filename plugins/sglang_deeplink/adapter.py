"""SGLang's cache pool and model config, in kvconnector's terms. Tested with SGLang 0.5.23."""

from __future__ import annotations

from typing import Any

from deeplink.config import KVSection
from deeplink.errors import ConfigError, LayoutError
from deeplink.kvconnector.caches.cache import Cache
from deeplink.kvconnector.caches.device_cache import host_array
from deeplink.kvconnector.caches.group import Group
from deeplink.kvconnector.contracts import rope, weights
from deeplink.kvconnector.contracts.contract import CacheGroup, Contract, Model, Rank
from deeplink.kvconnector.contracts.negotiate import FULL
from deeplink.kvconnector.layouts.layout import Layout
from deeplink.registry import Registry

DTYPES = ("float32", "bfloat16", "float16")
"""Types of the cache that this plugin reads; the 8-bit ones have scales that it does not look up yet."""

LAYOUTS = {"nhd": "sglang-nhd"}
"""SGLang's names of a pool's layout and ours (`kvconnector/layouts/catalogue.py`)."""

POOL = "MHATokenToKVPool"


def check_supported(server_args: Any, settings: KVSection, role: str) -> None:
    """Refuse at start-up, by the name of the setting, what this release cannot hand over."""
    for field in ("tp_size", "pp_size", "dp_size", "attn_cp_size", "dcp_size"):
        value = getattr(server_args, field)
        if value != 1:
            raise ConfigError(
                "this release hands over only with one of them",
                field=field.replace("_", "-"),
                ours=str(value),
                theirs="1",
            )
    for field, empty in (
        ("speculative_algorithm", None),
        ("enable_hisparse", False),
        ("enable_pd_role_switch", False),
        ("enable_unified_memory", False),
        ("enable_memory_saver", False),
    ):
        value = getattr(server_args, field, empty)
        if value != empty:
            raise ConfigError(
                "this release does not hand over with it",
                field=field.replace("_", "-"),
                ours=str(value),
                theirs="not set",
            )
    if role == "decode" and settings.on_failure != "fail":
        raise ConfigError(
            "a decode engine of SGLang cannot prefill, so what does not arrive cannot be recomputed",
            field="kv.on_failure",
            ours=settings.on_failure,
            theirs="fail",
        )


def read_group(pool: Any, total_heads: int, known: Registry[str]) -> Group:
    """The cache group with its arrays, from the live pool: for each layer ``[slot, head, dim]`` of K and of V. Raises
    LayoutError for anything else."""
    kind = type(pool).__name__
    if kind != POOL or pool.is_quantized_kv_cache:
        raise LayoutError(
            f"this release hands over caches of the kind {POOL} without quantization",
            field="kind of KV cache",
            ours=kind,
            theirs=POOL,
        )
    if pool.kv_cache_layout not in LAYOUTS or pool.head_dim != pool.v_head_dim:
        raise LayoutError(
            "a pool whose layout this release does not know",
            field="layout",
            ours=f"{pool.kv_cache_layout}, K of {pool.head_dim} and V of {pool.v_head_dim} elements",
            theirs=", ".join(LAYOUTS),
        )
    dtype = str(pool.dtype).removeprefix("torch.")
    if dtype not in DTYPES or pool.store_dtype != pool.dtype:
        raise LayoutError(f"a cache of {dtype}; this plugin reads {', '.join(DTYPES)}", field="dtype", theirs=dtype)
    if pool.head_num != total_heads:
        raise LayoutError(
            f"a cache of {pool.head_num} heads, of a model with {total_heads}",
            field="heads",
            ours=str(total_heads),
            theirs=str(pool.head_num),
        )
    text = known.get(LAYOUTS[pool.kv_cache_layout])
    pages = (pool.size + pool.page_size) // pool.page_size
    bound = Layout.parse(text).bind(
        heads=pool.head_num, head_dim=pool.head_dim, block_size=pool.page_size, blocks=pages
    )
    elements = pages * pool.page_size * pool.head_num * pool.head_dim
    shape = (pool.size + pool.page_size, pool.head_num, pool.head_dim)
    layers = tuple(range(pool.start_layer, pool.start_layer + pool.layer_num))
    arrays = tuple(
        host_array(f"{side} of layer {layer}", buffers[place], shape)[:elements]
        for place, layer in enumerate(layers)
        for side, buffers in (("K", pool.k_buffer), ("V", pool.v_buffer))
    )
    stated = CacheGroup(FULL, layers, total_heads, pool.head_dim, dtype, pool.page_size, text)
    return Group(stated, layers, (0, total_heads), Cache(arrays, bound))


def read_model(config: Any) -> Model:
    """Model identity, with the weights fingerprint of the checkpoint on disk, from SGLang's `ModelConfig`."""
    return Model(
        architecture=", ".join(config.hf_config.architectures),
        layers=config.num_hidden_layers,
        vocabulary=config.vocab_size,
        rope=rope.canonical(config.hf_text_config),
        quantization=str(config.quantization or "none"),
        weights=weights.fingerprint(weights.checkpoint(config.model_path, config.revision)),
    )


def make_contract(
    role: str,
    epoch: str,
    group: Group,
    model: Model,
    channel: str,
    transports: dict[str, str],
    casts: tuple[str, ...],
) -> Contract:
    from importlib.metadata import version

    from sglang.srt.platforms import current_platform

    return Contract(
        engine="sglang",
        engine_version=version("sglang"),
        chip=str(current_platform.device_name or current_platform.device_type),
        role=role,
        epoch=epoch,
        model=model,
        groups=(group.spec,),
        ranks=(Rank(0, 0, 0, (group.heads,), (min(group.layers), max(group.layers) + 1), channel, transports),),
        casts=casts,
        alone=False,  # SGLang serves no request without its other half once it is told to disaggregate
    )
