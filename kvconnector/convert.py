"""Re-layout: copy between an engine's blocks and the wire form, in one pass.

The wire form of a chunk is ``[layer, kv, head, token, dim]``, dense, of the cache's element type; where a cache has
one vector a token, kv and head are 1. Whatever the engine's layout, both are strided views of one logical index
space, so every conversion is an assignment between two views of equal shape: nothing here knows a layout by name.

Tensors carry their axes as a suffix: L layer, S kv (K then V), H head, T token of the chunk, D dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deeplink.errors import LayoutError
from deeplink.kvconnector.layout import ELEMENTS, Bound, Factor, Strided
from deeplink.kvconnector.plan import Run

Elements = npt.NDArray[Any]

STORAGE = {1: np.uint8, 2: np.uint16, 4: np.uint32}
"""Elements are moved, never computed with, so any unsigned integer of the right size will do."""


def storage_dtype(dtype: str) -> np.dtype[Any]:
    return np.dtype(STORAGE[ELEMENTS[dtype]])


def wire_shape(bound: Bound, layers: int, tokens: int) -> tuple[int, int, int, int, int]:
    return layers, bound.kv, bound.heads, tokens, bound.head_dim


def gather(caches: Sequence[Elements], bound: Bound, where: Iterable[Run], wire_LSHTD: Elements) -> None:
    """Blocks to wire. `caches` holds the flat arrays of each layer in turn (one, unless the layout says that there are
    several tensors); their element 0 is element 0 of block 0."""
    moves = _moves(caches, bound, where, wire_LSHTD)
    for layer, wire in enumerate(wire_LSHTD):
        for move in moves:
            np.copyto(move.on_wire(wire), move.in_blocks(caches[layer * bound.tensors + move.tensor]))


def scatter(wire_LSHTD: Elements, bound: Bound, where: Iterable[Run], caches: Sequence[Elements]) -> None:
    """Wire to blocks. Writes the elements of these tokens and no others."""
    moves = _moves(caches, bound, where, wire_LSHTD)
    for layer, wire in enumerate(wire_LSHTD):
        for move in moves:
            np.copyto(move.in_blocks(caches[layer * bound.tensors + move.tensor]), move.on_wire(wire))


@dataclass(frozen=True, slots=True)
class _Move:
    """One strided copy of one layer: the same shape seen in the blocks and on the wire (bytes, not elements)."""

    tensor: int
    shape: tuple[int, ...]
    block_offset: int
    block_strides: tuple[int, ...]
    wire_offset: int
    wire_strides: tuple[int, ...]

    # numpy checks offset, shape and strides against the buffer once more, whatever `_moves` has let through.
    def in_blocks(self, cache: Elements) -> Elements:
        return np.ndarray(self.shape, cache.dtype, cache.data, self.block_offset, self.block_strides)

    def on_wire(self, wire_SHTD: Elements) -> Elements:
        return np.ndarray(self.shape, wire_SHTD.dtype, wire_SHTD.data, self.wire_offset, self.wire_strides)


def _moves(caches: Sequence[Elements], bound: Bound, where: Iterable[Run], wire_LSHTD: Elements) -> list[_Move]:
    """The copies of one layer; they are the same for every layer. A wrong plan raises here, before anything moves."""
    layers, rest = divmod(len(caches), bound.tensors)
    if rest:
        raise LayoutError(f"{len(caches)} arrays for layers that have {bound.tensors} tensors each")
    expected = wire_shape(bound, layers, wire_LSHTD.shape[3] if wire_LSHTD.ndim == 5 else 0)
    if not wire_LSHTD.flags.c_contiguous or wire_LSHTD.shape != expected:
        raise LayoutError(
            f"a wire chunk must be dense [layer, kv, head, token, dim] {expected}, not {wire_LSHTD.shape}"
        )
    sizes = [bound.elements(tensor) for tensor in range(bound.tensors)]
    for cache, size in zip(caches, sizes * layers, strict=True):
        if cache.ndim != 1 or not cache.flags.c_contiguous or cache.dtype != wire_LSHTD.dtype or cache.size < size:
            raise LayoutError(f"gather and scatter want flat caches of {size} elements of type {wire_LSHTD.dtype}")
    _, _, _, tokens, dim = wire_LSHTD.shape
    moves = []
    for run in where:
        if run.block < 0 or run.block + run.count > bound.blocks:
            raise LayoutError(f"blocks [{run.block}, {run.block + run.count}) of a cache that has {bound.blocks}")
        if run.at < 0 or run.at + run.count * run.tokens > tokens:
            raise LayoutError(f"tokens [{run.at}, {run.at + run.count * run.tokens}) of a wire chunk of {tokens}")
        for side in bound.sides:
            base = side.kv * bound.heads * tokens * dim + side.first_dim
            for rows in _rows(run, side.of("token")):
                moves.append(_move(bound, side, run, rows, base, tokens, wire_LSHTD.itemsize))
    return moves


Rows = Sequence[tuple[int, int]]
"""For each token factor, outermost first: ``(first index, extent)``."""


def _rows(run: Run, factors: tuple[Factor, ...]) -> Iterator[Rows]:
    """Tokens ``[first, first + tokens)`` of a block as rectangles in the token factors."""
    start, stop = run.first, run.first + run.tokens
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


def _move(bound: Bound, side: Strided, run: Run, rows: Rows, base: int, tokens: int, itemsize: int) -> _Move:
    (block,) = side.of("block")
    dim = bound.head_dim
    block_offset = side.offset + run.block * block.stride
    token = run.at - run.first
    shape = [run.count]
    block_strides = [block.stride]
    wire_strides = [bound.block_size * dim]
    for factor in side.of("head"):
        shape.append(factor.extent)
        block_strides.append(factor.stride)
        wire_strides.append(factor.unit * tokens * dim)
    for factor, (first, extent) in zip(side.of("token"), rows, strict=True):
        block_offset += first * factor.stride
        token += first * factor.unit
        shape.append(extent)
        block_strides.append(factor.stride)
        wire_strides.append(factor.unit * dim)
    for factor in side.of("dim"):
        shape.append(factor.extent)
        block_strides.append(factor.stride)
        wire_strides.append(factor.unit)
    return _Move(
        side.tensor,
        tuple(shape),
        block_offset * itemsize,
        tuple(stride * itemsize for stride in block_strides),
        (base + token * dim) * itemsize,
        tuple(stride * itemsize for stride in wire_strides),
    )
