"""Writing into KV caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class FillKvCache(Protocol):
    """Put new tokens into their slots of a paged cache."""

    def __call__(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        kv_indices: Tensor,
        k_scales_zeros: Sequence[Tensor | None],
        v_scales_zeros: Sequence[Tensor | None],
        quant_bits: int,
    ) -> tuple[Tensor, Tensor]:
        """`key` [T, Hkv, D], `value` [T, Hkv, Dv]; writes the caches in place and gives them back.

        `kv_indices` [T], int32, each ``block * block_size + offset``, no two alike. No other slot is touched. With
        `quant_bits` 8 the caches are int8 and the pairs hold (scale, zero), each [Hkv, D]: what is written is
        ``clamp(round(x / scale - zero), -128, 127)``; with 0 the pairs are empty, and bytes are copied.
        """


class FillContiguousKvCache(Protocol):
    """Append to caches that lie in one piece."""

    def __call__(
        self, key_cache: Tensor, value_cache: Tensor, key_state: Tensor, value_state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Caches [B, S, Hkv, D] and states [B, T, Hkv, D]; gives caches [B, S + T, Hkv, D]."""


class GetCacheLen(Protocol):
    """How many tokens a cache holds that lies in one piece."""

    def __call__(self, cache: Tensor) -> int:
        """`cache` [B, S, Hkv, D]; gives S."""
