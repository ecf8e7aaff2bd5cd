"""What re-layout moves: strided copies of equal shape, seen in the blocks and on the wire.

Here the plan of one gather or scatter is made and checked, and nothing moves. A `Move` is relative to its run, so the
moves of a block size, a first token and a number of tokens are computed once, however many blocks a chunk has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from deeplink.errors import LayoutError
from deeplink.kvconnector.layouts.layout import Bound, Factor, Strided
from deeplink.kvconnector.relayout.plan import Run

Into = Literal["blocks", "wire"]

Dimension = tuple[int, int, int]
"""Extent, stride in the blocks and stride on the wire, in bytes."""


@dataclass(frozen=True, slots=True)
class Move:
    """One strided copy of one layer for one block of a run, in bytes.

    `each_block` are the strides from one block of the run to the next, in the blocks and on the wire, and
    `token_bytes` is the stride from token to token on the wire: the offsets are those of block 0 and token 0.
    Dimensions of extent 1 are left out.
    """

    tensor: int
    itemsize: int
    dimensions: tuple[Dimension, ...]
    block_offset: int
    wire_offset: int
    each_block: tuple[int, int]
    token_bytes: int

    def of(self, run: Run) -> tuple[tuple[Dimension, ...], int, int]:
        """Dimensions, offset in the blocks and offset on the wire for this run."""
        in_blocks, on_wire = self.each_block
        dimensions = self.dimensions if run.count == 1 else ((run.count, in_blocks, on_wire), *self.dimensions)
        return dimensions, self.block_offset + run.block * in_blocks, self.wire_offset + run.at * self.token_bytes


@lru_cache(maxsize=1024)
def moves(bound: Bound, itemsize: int, wire_tokens: int, first: int, tokens: int) -> tuple[Move, ...]:
    """The copies of one layer for a run whose blocks hold `tokens` tokens of the chunk each, from their `first` on."""
    return tuple(
        _move(bound, side, rows, first, wire_tokens, itemsize)
        for side in bound.sides
        for rows in _rows(first, tokens, side.of("token"))
    )


def checked(where: Iterable[Run], bound: Bound, wire_tokens: int) -> list[Run]:
    """The runs, every one inside the cache and the wire chunk. Raises LayoutError, before anything moves."""
    runs = list(where)
    for run in runs:
        if run.block < 0 or run.count < 1 or run.block + run.count > bound.blocks:
            raise LayoutError(f"blocks [{run.block}, {run.block + run.count}) of a cache that has {bound.blocks}")
        if run.first < 0 or run.tokens < 1 or run.first + run.tokens > bound.block_size:
            raise LayoutError(f"tokens [{run.first}, {run.first + run.tokens}) of a block of {bound.block_size}")
        if run.count > 1 and run.tokens != bound.block_size:
            raise LayoutError(f"a run of {run.count} blocks with {run.tokens} of {bound.block_size} tokens each")
        if run.at < 0 or run.at + run.count * run.tokens > wire_tokens:
            raise LayoutError(f"tokens [{run.at}, {run.at + run.count * run.tokens}) of a wire chunk of {wire_tokens}")
    return runs


def widest(dimensions: Sequence[Dimension], itemsize: int, most: int) -> tuple[int, list[Dimension]]:
    """Make what is contiguous on both sides one element of up to `most` bytes: its bytes, and what is left."""
    rest = [dimension for dimension in dimensions if dimension[0] != 1]
    size = itemsize
    while inner := [each for each in rest if each[1] == each[2] == size and size * each[0] <= most]:
        rest.remove(inner[0])
        size *= inner[0][0]
    return size, rest


Rows = Sequence[tuple[int, int]]
"""For each token factor, outermost first: ``(first index, extent)``."""


def _rows(first: int, tokens: int, factors: tuple[Factor, ...]) -> Iterator[Rows]:
    """Tokens ``[first, first + tokens)`` of a block as rectangles in the token factors."""
    start, stop = first, first + tokens
    if len(factors) == 1:
        yield [(start, stop - start)]
        return
    unit = factors[0].unit
    while start < stop:
        quotient, rest = divmod(start, unit)
        if rest == 0 and stop - start >= unit:
            whole = (stop - start) // unit
            yield [(quotient, whole), (0, unit)]
            start += whole * unit
        else:
            end = min(stop, (quotient + 1) * unit)
            yield [(quotient, 1), (rest, end - start)]
            start = end


def _move(bound: Bound, side: Strided, rows: Rows, first: int, wire_tokens: int, itemsize: int) -> Move:
    (block,) = side.of("block")
    dim = bound.head_dim
    block_offset, token = side.offset, -first
    dimensions = [(factor.extent, factor.stride, factor.unit * wire_tokens * dim) for factor in side.of("head")]
    for factor, (start, extent) in zip(side.of("token"), rows, strict=True):
        block_offset += start * factor.stride
        token += start * factor.unit
        dimensions.append((extent, factor.stride, factor.unit * dim))
    dimensions += [(factor.extent, factor.stride, factor.unit) for factor in side.of("dim")]
    wire_offset = (side.kv * bound.heads * wire_tokens + token) * dim + side.first_dim
    return Move(
        side.tensor,
        itemsize,
        tuple((extent, a * itemsize, b * itemsize) for extent, a, b in dimensions if extent != 1),
        block_offset * itemsize,
        wire_offset * itemsize,
        (block.stride * itemsize, bound.block_size * dim * itemsize),
        dim * itemsize,
    )
