"""What works on one token at a time: the gated activation, and rotary position embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class SiluAndMul(Protocol):
    """``silu(gate) * up`` with ``silu(x) = x / (1 + exp(-x))`` (Shazeer, 2020)."""

    def __call__(self, input_tensor: Tensor, dim: int) -> Tensor:
        """`input_tensor` holds gate in the first half along `dim` and up in the second; gives half of it."""


class ApplyRotaryPosEmb(Protocol):
    """Turn pairs of a head's elements by an angle of the token's position (Su et al., 2021).

    With R the last axis of `cos`, element i < R/2 is paired with i + R/2 (halves, not neighbours):
    ``x[i] cos[i] - x[i + R/2] sin[i]`` and ``x[i + R/2] cos[i + R/2] + x[i] sin[i + R/2]``.
    """

    def __call__(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """`query` [T, Hq, D], `key` [T, Hkv, D], `cos` and `sin` [T, R], R <= D; elements from R on stay as they are.

        Gives new tensors of the shapes of `query` and `key`; may overwrite these two.
        """
