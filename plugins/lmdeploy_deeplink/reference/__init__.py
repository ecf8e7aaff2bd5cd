"""A vendor in plain torch, for any device that torch knows: what the operators mean, readable, and not made for speed.

It runs where a chip's own operators do not, an LMDeploy engine on a CPU for one, and it is what the conformance suite's
seeded faults are put into. A module per group of operators: attention, caches, elementwise, experts, matmul,
norms; `formats` is what matrices look like in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.errors import PluginError

if TYPE_CHECKING:
    from lmdeploy_deeplink.operators.vendor import Vendor

NAME = "reference"


def load() -> Vendor:
    """Raises PluginError where there is no torch."""
    try:
        import torch
    except ImportError as exc:
        raise PluginError(
            "the vendor reference computes with torch, and this Python has none",
            remedy="run deeplink with the Python of the engine",
        ) from exc
    from lmdeploy_deeplink.operators.vendor import Operators, Vendor
    from lmdeploy_deeplink.reference import attention, caches, elementwise, experts, formats, matmul, norms

    return Vendor(
        NAME,
        f"torch {torch.__version__}",
        "cpu",
        Operators(
            add_rms_norm=norms.add_rms_norm,
            add_rms_norm_w8a8=norms.add_rms_norm_w8a8,
            apply_rotary_pos_emb=elementwise.apply_rotary_pos_emb,
            dynamic_quant=matmul.dynamic_quant,
            fill_contiguous_kvcache=caches.fill_contiguous_kvcache,
            fill_kv_cache=caches.fill_kv_cache,
            fused_attention=attention.fused_attention,
            fused_moe=experts.fused_moe,
            get_cache_len=caches.get_cache_len,
            incre_flash_attention=attention.incre_flash_attention,
            linear=matmul.linear,
            linear_w8a8=matmul.linear_w8a8,
            moe_gating_topk_softmax=experts.moe_gating_topk_softmax,
            paged_decode_attention=attention.paged_decode_attention,
            paged_prefill_attention=attention.paged_prefill_attention,
            prefill_attention=attention.prefill_attention,
            rms_norm=norms.rms_norm,
            rms_norm_w8a8=norms.rms_norm_w8a8,
            silu_and_mul=elementwise.silu_and_mul,
            transdata=formats.transdata,
            weight_quant_matmul=matmul.weight_quant_matmul,
        ),
    )
