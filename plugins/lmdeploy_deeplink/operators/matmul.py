"""Matrix products, plain and with weights or activations in 8 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Linear(Protocol):
    """``x weight^T + bias``."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, all_reduce: bool, group: str) -> Tensor:
        """`x` [..., K], `weight` [N, K], `bias` [N]; gives [..., N], summed over `group` with `all_reduce`."""


class WeightQuantMatmul(Protocol):
    """``x1 ((x2 + offset) * scale) + bias`` with a weight in 8 bits."""

    def __call__(
        self,
        x1: Tensor,
        x2: Tensor,
        scale: Tensor,
        offset: Tensor | None,
        bias: Tensor | None,
        all_reduce: bool,
        group_size: int,
    ) -> Tensor:
        """`x1` [T, K], `x2` [K, N] int8; gives [T, N].

        `scale` and `offset` are [N], or [K / group_size, N] with a `group_size`, of the element type of `x1`.
        """


class DynamicQuant(Protocol):
    """Each token divided by its scale, ``max |x| / 127``, and rounded to the nearest integer."""

    def __call__(self, x: Tensor, quant_dtype: torch.dtype, quant_granularity: str) -> tuple[Tensor, Tensor]:
        """`x` [..., K]; gives ([..., K] of `quant_dtype`, scales [...] float32). A token of zeros stays zeros.

        `quant_dtype` is int8 and `quant_granularity` "PER_TOKEN"; others are not specified here.
        """


class LinearW8A8(Protocol):
    """``(a b^T) * rms_scale * linear_scale + bias``, the product of integers exact."""

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        rms_scale: Tensor,
        linear_scale: Tensor,
        out_dtype: torch.dtype,
        quant_dtype: torch.dtype,
        bias: Tensor | None,
    ) -> Tensor:
        """`a` [T, K], `b` [N, K] int8, `rms_scale` [T] and `linear_scale` [N] float32; gives [T, N] of `out_dtype`."""
