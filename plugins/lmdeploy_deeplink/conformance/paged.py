"""Paged caches as cases need them: blocks in no order, what must not be read filled with what would be noticed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lmdeploy_deeplink.conformance.inputs import Inputs
from lmdeploy_deeplink.operators.vendor import HEAD_FIRST

if TYPE_CHECKING:
    from torch import Tensor

# What a slot holds that no sequence has written to. A sum that has it in is off by far, in any element type.
STALE = 1000.0
_SPARE_BLOCKS = 3


@dataclass(frozen=True, slots=True)
class Paged:
    """`key` and `value` [total tokens, Hkv, size] as they lie in the caches, sequence after sequence."""

    key: Tensor
    value: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    slots: Tensor


def paged(
    inputs: Inputs,
    lengths: tuple[int, ...],
    block_size: int,
    kv_heads: int,
    sizes: tuple[int, int],
    axes: str,
    *,
    pool: bool,
    filled: bool = True,
) -> Paged:
    """Caches that hold sequences of these lengths, or with `filled` False could.

    With `pool` they are views of one tensor in which K and V of a block lie side by side, as an engine's pool has them.
    """
    needed = [-(-length // block_size) for length in lengths]
    count = sum(needed) + _SPARE_BLOCKS
    order = inputs.shuffled(count)
    # Behind a sequence's own blocks the table names a block of nobody's.
    rows = [order[sum(needed[:n]) :][: needed[n]] for n in range(len(lengths))]
    longest = max(needed, default=0)
    table = [row + [order[-1]] * (longest - len(row)) for row in rows]
    slots = [
        row[place // block_size] * block_size + place % block_size
        for row, length in zip(rows, lengths, strict=True)
        for place in range(length)
    ]
    tokens = tuple(inputs.normal(sum(lengths), kv_heads, size) for size in sizes)
    caches = _caches(inputs, count, block_size, kv_heads, sizes, axes, pool)
    if filled:
        for states, cache in zip(tokens, caches, strict=True):
            for slot, token in zip(slots, states, strict=True):
                place(cache, axes, slot, block_size).copy_(token)
    table_tensor = inputs.int32(table).reshape(len(lengths), longest)
    return Paged(tokens[0], tokens[1], caches[0], caches[1], table_tensor, inputs.int32(slots))


def place(cache: Tensor, axes: str, slot: int, block_size: int) -> Tensor:
    """[Hkv, size]: one token in a cache."""
    block, offset = divmod(slot, block_size)
    return cache[block, :, offset] if axes == HEAD_FIRST else cache[block, offset]


def _caches(
    inputs: Inputs, count: int, block_size: int, kv_heads: int, sizes: tuple[int, int], axes: str, pool: bool
) -> list[Tensor]:
    inner = (kv_heads, block_size) if axes == HEAD_FIRST else (block_size, kv_heads)
    stale = torch.full((), STALE, dtype=inputs.dtype, device=inputs.device)
    if not pool:
        return [stale.expand(count, *inner, size).clone() for size in sizes]
    area = block_size * kv_heads
    whole = stale.expand(count, area * sum(sizes)).clone()
    split = area * sizes[0]
    return [
        whole[:, :split].unflatten(1, (*inner, sizes[0])),
        whole[:, split:].unflatten(1, (*inner, sizes[1])),
    ]
