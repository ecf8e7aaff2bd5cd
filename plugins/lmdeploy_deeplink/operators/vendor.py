"""Who brings operators. Several vendors are in one process: nothing here is global."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from deeplink.errors import UnsupportedOperator
from lmdeploy_deeplink.operators import attention, caches, elementwise, experts, formats, matmul, norms

# As in the layout notation of `deeplink.kvconnector.layouts.layout`.
BLOCK_FIRST = "block token head dim"
HEAD_FIRST = "block head token dim"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operators:
    """A vendor's operators by name; None where it has none."""

    add_rms_norm: norms.AddRmsNorm | None = None
    add_rms_norm_w8a8: norms.AddRmsNormW8A8 | None = None
    apply_rotary_pos_emb: elementwise.ApplyRotaryPosEmb | None = None
    dynamic_quant: matmul.DynamicQuant | None = None
    fill_contiguous_kvcache: caches.FillContiguousKvCache | None = None
    fill_kv_cache: caches.FillKvCache | None = None
    fused_attention: attention.FusedAttention | None = None
    fused_moe: experts.FusedMoe | None = None
    get_cache_len: caches.GetCacheLen | None = None
    incre_flash_attention: attention.IncreFlashAttention | None = None
    linear: matmul.Linear | None = None
    linear_w8a8: matmul.LinearW8A8 | None = None
    moe_gating_topk_softmax: experts.MoeGatingTopkSoftmax | None = None
    paged_decode_attention: attention.PagedDecodeAttention | None = None
    paged_prefill_attention: attention.PagedPrefillAttention | None = None
    prefill_attention: attention.PrefillAttention | None = None
    rms_norm: norms.RmsNorm | None = None
    rms_norm_w8a8: norms.RmsNormW8A8 | None = None
    silu_and_mul: elementwise.SiluAndMul | None = None
    transdata: formats.Transdata | None = None
    weight_quant_matmul: matmul.WeightQuantMatmul | None = None


NAMES: tuple[str, ...] = tuple(each.name for each in fields(Operators))


@dataclass(frozen=True, slots=True)
class Vendor:
    """`device` is where its tensors live, as torch spells it. `version` is for people to read.

    `absent` says why an operator is not there, where more is known than that it is not.
    """

    name: str
    version: str
    device: str
    operators: Operators
    cache_axes: str = BLOCK_FIRST
    absent: Mapping[str, str] = field(default_factory=dict)

    def get(self, name: str) -> Any:
        """The operator `name`, one of NAMES. Raises UnsupportedOperator when this vendor has none."""
        found = getattr(self.operators, name)
        if found is None:
            raise UnsupportedOperator(
                f"the vendor {self.name} has no {name}{': ' * (name in self.absent)}{self.absent.get(name, '')}",
                field=name,
                theirs=self.name,
                remedy=f"it has: {', '.join(self.has()) or 'none'}",
            )
        return found

    def has(self) -> list[str]:
        return [name for name in NAMES if getattr(self.operators, name) is not None]

    def replaced(self, **operators: Any) -> Vendor:
        """The same vendor with some operators exchanged, for one that overrides a few of another's."""
        return replace(self, operators=replace(self.operators, **operators))
