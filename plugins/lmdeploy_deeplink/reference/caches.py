"""Writing into KV caches by index, so that a cache may be a strided view."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from deeplink.errors import UnsupportedOperator

if TYPE_CHECKING:
    from torch import Tensor


def fill_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    kv_indices: Tensor,
    k_scales_zeros: Sequence[Tensor | None],
    v_scales_zeros: Sequence[Tensor | None],
    quant_bits: int,
) -> tuple[Tensor, Tensor]:
    if quant_bits not in (0, 8):
        raise UnsupportedOperator(
            f"caches of {quant_bits} bits are not written here",
            field="fill_kv_cache.quant_bits",
            theirs=str(quant_bits),
        )
    slots = kv_indices.reshape(-1).long()
    for states, cache, scales_zeros in ((key, key_cache, k_scales_zeros), (value, value_cache, v_scales_zeros)):
        size = cache.shape[1]
        new = _quantized(states, *scales_zeros) if quant_bits else states
        cache[slots // size, slots % size] = new.to(cache.dtype)
    return key_cache, value_cache


def _quantized(states: Tensor, scale: Tensor | None, zero: Tensor | None) -> Tensor:
    assert scale is not None
    assert zero is not None
    return (states.float() / scale.float() - zero.float()).round().clamp(-128, 127)


def fill_contiguous_kvcache(
    key_cache: Tensor, value_cache: Tensor, key_state: Tensor, value_state: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.cat((key_cache, key_state), 1), torch.cat((value_cache, value_state), 1)


def get_cache_len(cache: Tensor) -> int:
    return int(cache.shape[1])
