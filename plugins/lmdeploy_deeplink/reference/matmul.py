"""Matrix products. A plain one is torch's own, which sums in float32; products of 8-bit integers are exact."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deeplink.errors import UnsupportedOperator

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST = 127


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, all_reduce: bool, group: str) -> Tensor:
    _alone(all_reduce, "linear")
    return torch.nn.functional.linear(x, weight, bias)


def weight_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    bias: Tensor | None,
    all_reduce: bool,
    group_size: int,
) -> Tensor:
    _alone(all_reduce, "weight_quant_matmul")
    if x2.dtype != torch.int8:
        raise UnsupportedOperator(
            f"weights of {x2.dtype} are not read here", field="weight_quant_matmul.x2", theirs=str(x2.dtype)
        )
    weight, scale = x2.float(), scale.float()
    if group_size:
        scale = scale.repeat_interleave(group_size, 0)
        offset = None if offset is None else offset.repeat_interleave(group_size, 0)
    if offset is not None:
        weight = weight + offset.float()
    product = x1.float() @ (weight * scale)
    return (product if bias is None else product + bias.float()).to(x1.dtype)


def dynamic_quant(x: Tensor, quant_dtype: torch.dtype, quant_granularity: str) -> tuple[Tensor, Tensor]:
    if quant_dtype != torch.int8 or quant_granularity != "PER_TOKEN":
        raise UnsupportedOperator(
            f"quantization to {quant_dtype}, {quant_granularity}, is not there",
            field="dynamic_quant",
            theirs=f"{quant_dtype} {quant_granularity}",
            remedy="int8 PER_TOKEN is",
        )
    values = x.float()
    scale = values.abs().amax(-1) / _LARGEST
    # A token of zeros has the scale 0: divide by one instead, so that it stays zeros.
    divisor = torch.where(scale == 0, torch.ones_like(scale), scale).unsqueeze(-1)
    return (values / divisor).round().clamp(-_LARGEST - 1, _LARGEST).to(torch.int8), scale


def linear_w8a8(
    a: Tensor,
    b: Tensor,
    rms_scale: Tensor,
    linear_scale: Tensor,
    out_dtype: torch.dtype,
    quant_dtype: torch.dtype,
    bias: Tensor | None,
) -> Tensor:
    # int8 products and their sums are integers below 2^53, so float64 holds them exactly.
    product = (a.double() @ b.double().T) * rms_scale.double().reshape(-1, 1) * linear_scale.double().reshape(1, -1)
    return (product if bias is None else product + bias.double()).to(out_dtype)


def _alone(all_reduce: bool, name: str) -> None:
    if all_reduce:
        raise UnsupportedOperator(f"{name} sums over no group here", field=f"{name}.all_reduce", theirs="True")
