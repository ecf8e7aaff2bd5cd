"""Root-mean-square norms, computed in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lmdeploy_deeplink.reference.matmul import dynamic_quant

if TYPE_CHECKING:
    from torch import Tensor


def rms_norm(hidden_states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    x = hidden_states.float()
    inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    return (x * inverse * weight.float()).to(hidden_states.dtype)


def add_rms_norm(hidden_states: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    added = hidden_states + residual
    return rms_norm(added, weight, epsilon), added


def rms_norm_w8a8(
    hidden_states: Tensor, weight: Tensor, epsilon: float, quant_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return dynamic_quant(rms_norm(hidden_states, weight, epsilon), quant_dtype, "PER_TOKEN")


def add_rms_norm_w8a8(
    hidden_states: Tensor, residual: Tensor, weight: Tensor, epsilon: float, quant_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    normed, added = add_rms_norm(hidden_states, residual, weight, epsilon)
    return *dynamic_quant(normed, quant_dtype, "PER_TOKEN"), added
