"""Root-mean-square norms, with the sum that residual streams need and the quantization that follows in 8-bit models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class RmsNorm(Protocol):
    """``x / sqrt(mean(x^2) + epsilon) * weight``, the mean over the last axis (Zhang and Sennrich, 2019)."""

    def __call__(self, hidden_states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """`hidden_states` [..., H], `weight` [H] of the same element type; gives [..., H]."""


class AddRmsNorm(Protocol):
    """The norm of a sum, and the sum."""

    def __call__(
        self, hidden_states: Tensor, residual: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """Gives (rms_norm(hidden_states + residual), hidden_states + residual), both [..., H].

        May overwrite `hidden_states` and `residual`, and give these back.
        """


class RmsNormW8A8(Protocol):
    """The norm, quantized for each token as `DynamicQuant` does it."""

    def __call__(
        self, hidden_states: Tensor, weight: Tensor, epsilon: float, quant_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Gives ([..., H] of `quant_dtype`, scales [...])."""


class AddRmsNormW8A8(Protocol):
    """The norm of a sum, quantized, and the sum."""

    def __call__(
        self, hidden_states: Tensor, residual: Tensor, weight: Tensor, epsilon: float, quant_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gives ([..., H] of `quant_dtype`, scales [...], the sum [..., H]). May overwrite both inputs."""
