"""Layouts of matrices that some chips compute in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Transdata(Protocol):
    """From rows (ND) to Ascend's fractal order (NZ): columns in strips of 32 bytes, each strip row after row."""

    def __call__(self, hidden_states: Tensor, transdata_type: int) -> Tensor:
        """`hidden_states` [M, N] or [B, M, N], float16 or int8, `transdata_type` 2.

        Gives [B, ceil(N / n), ceil(M / 16) 16, n] with n 16 for float16 and 32 for int8; what was not there is 0.
        """
