"""Mixtures of experts on one device, expert by expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deeplink.errors import UnsupportedOperator

if TYPE_CHECKING:
    from torch import Tensor


def moe_gating_topk_softmax(router_logits: Tensor, topk: int, moe_metadata: object | None) -> tuple[Tensor, Tensor]:
    _alone(moe_metadata, "moe_gating_topk_softmax")
    weights, experts = router_logits.float().softmax(-1).topk(topk, -1)
    return weights, experts


def fused_moe(
    hidden_states: Tensor,
    gate_up_weights: Tensor,
    down_weights: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    topk: int,
    renormalize: bool,
    moe_metadata: object | None,
) -> Tensor:
    _alone(moe_metadata, "fused_moe")
    weights = topk_weights.float()
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    out = hidden_states.new_zeros(hidden_states.shape, dtype=torch.float32)
    for expert in topk_ids.unique().tolist():
        tokens, choices = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = torch.nn.functional.linear(hidden_states[tokens], gate_up_weights[expert]).chunk(2, -1)
        act = (torch.nn.functional.silu(gate.float()) * up.float()).to(hidden_states.dtype)
        down = torch.nn.functional.linear(act, down_weights[expert]).float()
        out.index_add_(0, tokens, down * weights[tokens, choices].unsqueeze(-1))
    return out.to(hidden_states.dtype)


def _alone(moe_metadata: object | None, name: str) -> None:
    if moe_metadata is not None:
        raise UnsupportedOperator(
            f"{name} spreads no experts over devices here", field=f"{name}.moe_metadata", theirs=repr(moe_metadata)
        )
