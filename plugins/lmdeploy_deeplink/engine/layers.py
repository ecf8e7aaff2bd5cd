"""LMDeploy's layers out of a vendor's operators. What LMDeploy's releases ask for in unlike ways is the same here.

`spec` is what is asked of a layer, by the names that LMDeploy 0.18 has for it (its ``…BuildSpec``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from lmdeploy.pytorch.backends.activation import SiluAndMulImpl
from lmdeploy.pytorch.backends.attention import AttentionImpl, AttentionMetadata
from lmdeploy.pytorch.backends.default.apply_rotary_emb import DefaultApplyRotaryEmbImpl
from lmdeploy.pytorch.backends.default.linear import DefaultLinearImpl
from lmdeploy.pytorch.backends.moe import FusedMoEImpl, SoftmaxTopKImpl
from lmdeploy.pytorch.backends.norm import RMSNormImpl
from torch import Tensor

from deeplink.errors import UnsupportedOperator
from lmdeploy_deeplink.operators.vendor import Vendor


@dataclass
class Metadata(AttentionMetadata):
    """What a step's attention layers have in common. All of it is on the device, but for the numbers."""

    slots: Tensor | None = None
    block_size: int = 0
    longest_new: int = 0
    longest: int = 0
    cached_before: bool = False


class Answers:
    """What a backend answers alike in all releases, to be put before LMDeploy's own. `vendor_name` is the vendor's, and
    `sums_by` torch.distributed's name for what sums over processes."""

    vendor_name: str
    sums_by: str

    @classmethod
    def get_name(cls) -> str:
        return f"deeplink {cls.vendor_name}"

    @staticmethod
    def get_attention_metadata_cls() -> type[Metadata]:
        return Metadata

    @classmethod
    def ccl_backend(cls) -> str:
        return cls.sums_by

    @staticmethod
    def device_count() -> int:
        return 1

    @classmethod
    def update_step_context(cls, step_context: Any) -> Any:
        step_context.attn_metadata = metadata(step_context)
        return step_context


class Attention(AttentionImpl[Metadata]):
    """Writes the new tokens into the cache, then attends; of three operators the one that the step is about."""

    def __init__(self, vendor: Vendor, spec: Any) -> None:
        _refuse(
            spec,
            alibi=bool(spec.alibi),
            sliding_window=spec.sliding_window not in (None, -1, (-1, -1)),
            logit_softcapping=bool(spec.logit_softcapping) and spec.logit_softcapping > 0,
            causal=not spec.causal,
            use_flash_mla=bool(spec.use_flash_mla),
            mla_index_topk=spec.mla_index_topk is not None,
            learnable_sink=bool(spec.learnable_sink),
            block_sparse_size=spec.block_sparse_size > 1,
        )
        super().__init__(
            num_heads=spec.num_heads,
            head_size=spec.head_dim,
            scale=spec.scale,
            num_kv_heads=spec.num_kv_heads,
            v_head_size=spec.v_head_dim,
            causal=spec.causal,
        )
        self._fill = vendor.get("fill_kv_cache")
        self._prefill = vendor.get("prefill_attention")
        self._paged_prefill = vendor.get("paged_prefill_attention")
        self._decode = vendor.get("paged_decode_attention")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        attn_metadata: Metadata,
        k_scales_zeros: Any = None,
        v_scales_zeros: Any = None,
        learnable_sink: Any = None,
        nsa_indices: Any = None,
        inplace: bool = False,
    ) -> Tensor:
        step = attn_metadata
        self._fill(
            key=key,
            value=value,
            key_cache=k_cache,
            value_cache=v_cache,
            kv_indices=step.slots,
            k_scales_zeros=[],
            v_scales_zeros=[],
            quant_bits=0,
        )
        shape = (*query.shape[:-1], self.v_head_size)
        shared = {
            "query": query,
            "key_cache": k_cache,
            "value_cache": v_cache,
            "q_seq_len": step.q_seqlens,
            "kv_seq_len": step.kv_seqlens,
            "num_q_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "softmax_scale": self.scale,
            "alibi_slopes": None,
            "attn_output": query[..., : self.v_head_size] if inplace else query.new_empty(shape),
        }
        chunk = {
            "key": key,
            "value": value,
            "q_start_loc": step.cu_seqlens_q,
            "max_q_seq_len": step.longest_new,
            "attn_mask": [],
        }
        paged = {
            "block_table": step.block_offsets,
            "block_size": step.block_size,
            "max_kv_seq_len": step.longest,
            "kv_scales": None,
            "kv_zeros": None,
            "quant_bits": 0,
        }
        if step.longest_new == 1 and step.is_decoding:
            out: Tensor = self._decode(**shared, **paged)
        elif step.cached_before or step.is_decoding:
            out = self._paged_prefill(**shared, **chunk, **paged, cu_seq_lens_kv=step.cu_seqlens_k)
        else:
            out = self._prefill(**shared, **chunk)
        return out


def _refuse(spec: object, **asked: bool) -> None:
    for field, unlike in asked.items():
        if unlike:
            raise UnsupportedOperator(
                "attention of this model is not among the operators that a vendor has",
                field=f"{type(spec).__name__}.{field}",
                theirs=repr(getattr(spec, field)),
                remedy="run it on a device that LMDeploy serves by itself",
            )


class RMSNorm(RMSNormImpl):
    def __init__(self, vendor: Vendor, spec: Any) -> None:
        self._norm, self._added, self._epsilon = vendor.get("rms_norm"), vendor.get("add_rms_norm"), spec.eps

    def forward(self, x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Any:
        if residual is None:
            return self._norm(hidden_states=x, weight=weight, epsilon=self._epsilon)
        return self._added(hidden_states=x, residual=residual, weight=weight, epsilon=self._epsilon)


class SiluAndMul(SiluAndMulImpl):
    def __init__(self, vendor: Vendor) -> None:
        self._activate = vendor.get("silu_and_mul")

    def forward(self, x: Tensor) -> Any:
        return self._activate(input_tensor=x, dim=-1)


class ApplyRotaryEmb(DefaultApplyRotaryEmbImpl):
    """Neighbours that are paired (`complex_mode`) are no operator of a vendor's; LMDeploy's own code turns them."""

    def __init__(self, vendor: Vendor) -> None:
        self._turn = vendor.get("apply_rotary_pos_emb")

    def forward(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, inplace: bool = True, complex_mode: bool = False
    ) -> Any:
        if complex_mode or query.dim() != 3 or cos.dim() != 2:
            return super().forward(query, key, cos, sin, inplace, complex_mode=complex_mode)
        turned = self._turn(query=query, key=key, cos=cos, sin=sin)
        if not inplace:
            return turned
        return query.copy_(turned[0]), key.copy_(turned[1])


class Linear(DefaultLinearImpl):
    """Sums over a group of processes are LMDeploy's own."""

    def __init__(self, vendor: Vendor) -> None:
        self._product = vendor.get("linear")

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        all_reduce: bool = False,
        group: Any = None,
        rank: int = 0,
        scatter_size: list[int] | None = None,
    ) -> Any:
        if all_reduce:
            return super().forward(x, weight, bias, all_reduce, group, rank, scatter_size)
        return self._product(x=x, weight=weight, bias=bias, all_reduce=False, group="")


class SoftmaxTopK(SoftmaxTopKImpl):
    def __init__(self, vendor: Vendor, spec: Any) -> None:
        _refuse(spec, n_groups=spec.n_groups > 0, dim=spec.dim not in (-1, 1))
        self._gate, self._topk = vendor.get("moe_gating_topk_softmax"), spec.top_k

    def forward(self, x: Tensor) -> Any:
        return self._gate(router_logits=x, topk=self._topk, moe_metadata=None)


class FusedMoE(FusedMoEImpl):
    def __init__(self, vendor: Vendor, spec: Any) -> None:
        _refuse(spec, ep_size=spec.ep_size > 1)
        self._mix, self._topk, self._renormalize = vendor.get("fused_moe"), spec.top_k, spec.renormalize

    def forward(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        gate_up_weights: Tensor,
        down_weights: Tensor,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        expert_list: list[int] | None = None,
        act_func: Any = None,
    ) -> Any:
        if gate_up_bias is not None or down_bias is not None or act_func is not None:
            raise UnsupportedOperator(
                "experts with a bias or another activation are not among the operators", field="fused_moe"
            )
        return self._mix(
            hidden_states=hidden_states,
            gate_up_weights=gate_up_weights,
            down_weights=down_weights,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            topk=self._topk,
            renormalize=self._renormalize,
            moe_metadata=None,
        )


def metadata(step: Any) -> Metadata:
    """`block_offsets` [N, blocks], `q_seqlens` and `kv_seqlens` [N]: new tokens, and all of them."""
    size = step.kv_caches[0][0].shape[1]
    new, total = step.q_seqlens.long(), step.kv_seqlens.long()
    first = torch.repeat_interleave(total - new, new)
    start = torch.repeat_interleave(new.cumsum(0) - new, new)
    position = torch.arange(len(first), device=first.device) - start + first
    sequence = torch.repeat_interleave(torch.arange(len(new), device=new.device), new)
    slots = step.block_offsets.long()[sequence, position // size] * size + position % size
    return Metadata(
        step.is_decoding,
        step.block_offsets.int(),
        q_start_loc=step.q_start_loc,
        q_seqlens=new.int(),
        kv_seqlens=total.int(),
        cu_seqlens_q=_sums(new),
        cu_seqlens_k=_sums(total),
        quant_policy=step.kv_quant_policy,
        slots=slots.int(),
        block_size=size,
        longest_new=int(new.max()),
        longest=int(total.max()),
        cached_before=bool((new != total).any()),
    )


def _sums(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
