"""Re-layout: copy between an engine's blocks and the wire form, in one pass.

The wire form of a chunk is ``[layer, kv, head, token, dim]``, dense, of the cache's element type; where a cache has
one vector a token, kv and head are 1. Whatever the engine's layout, both are strided views of one logical index
space, so every conversion is an assignment between two views of equal shape: nothing here knows a layout by name.

Tensors carry their axes as a suffix: L layer, S kv (K then V), H head, T token of the chunk, D dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from deeplink.errors import LayoutError
from deeplink.kvconnector.layout import ELEMENTS, Bound, Factor, Strided
from deeplink.kvconnector.plan import Run

Into = Literal["blocks", "wire"]
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
    moves = _moves(caches, bound, where, wire_LSHTD, into="wire")
    for layer, wire in enumerate(wire_LSHTD):
        for move in moves:
            np.copyto(move.on_wire(wire), move.in_blocks(caches[layer * bound.tensors + move.tensor]))


def scatter(wire_LSHTD: Elements, bound: Bound, where: Iterable[Run], caches: Sequence[Elements]) -> None:
    """Wire to blocks. Writes the elements of these tokens and no others."""
    moves = _moves(caches, bound, where, wire_LSHTD, into="blocks")
    for layer, wire in enumerate(wire_LSHTD):
        for move in moves:
            np.copyto(move.in_blocks(caches[layer * bound.tensors + move.tensor]), move.on_wire(wire))


@dataclass(frozen=True, slots=True)
class _Move:
    """One strided copy of one layer: the same shape seen in the blocks and on the wire. Offsets and strides are in
    bytes; an `element` is one of the cache's, or several that are contiguous on both sides."""

    tensor: int
    element: np.dtype[Any]
    shape: tuple[int, ...]
    block_offset: int
    block_strides: tuple[int, ...]
    wire_offset: int
    wire_strides: tuple[int, ...]

    # numpy checks offset, shape and strides against the buffer once more, whatever `_moves` has let through.
    def in_blocks(self, cache: Elements) -> Elements:
        return np.ndarray(self.shape, self.element, cache.data, self.block_offset, self.block_strides)

    def on_wire(self, wire_SHTD: Elements) -> Elements:
        return np.ndarray(self.shape, self.element, wire_SHTD.data, self.wire_offset, self.wire_strides)


def _moves(
    caches: Sequence[Elements], bound: Bound, where: Iterable[Run], wire_LSHTD: Elements, into: Into
) -> list[_Move]:
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
    moves: list[_Move] = []
    for run in where:
        if run.block < 0 or run.block + run.count > bound.blocks:
            raise LayoutError(f"blocks [{run.block}, {run.block + run.count}) of a cache that has {bound.blocks}")
        if run.at < 0 or run.at + run.count * run.tokens > tokens:
            raise LayoutError(f"tokens [{run.at}, {run.at + run.count * run.tokens}) of a wire chunk of {tokens}")
        for side in bound.sides:
            base = side.kv * bound.heads * tokens * dim + side.first_dim
            for rows in _rows(run, side.of("token")):
                moves += _peeled(_move(bound, side, run, rows, base, tokens, wire_LSHTD.itemsize), into)
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
    element, factors = _widest(
        [
            (extent, in_blocks * itemsize, on_wire * itemsize)
            for extent, in_blocks, on_wire in zip(shape, block_strides, wire_strides, strict=True)
        ],
        itemsize,
    )
    return _Move(
        side.tensor,
        element,
        tuple(extent for extent, _, _ in factors),
        block_offset * itemsize,
        tuple(in_blocks for _, in_blocks, _ in factors),
        (base + token * dim) * itemsize,
        tuple(on_wire for _, _, on_wire in factors),
    )


_UNSIGNED = (1, 2, 4, 8)
_WIDEST = 1 << 30
"""Bytes of an element; numpy counts them in an int."""

Dimension = tuple[int, int, int]
"""Extent, stride in the blocks and stride on the wire, in bytes."""


def _widest(dimensions: list[Dimension], itemsize: int) -> tuple[np.dtype[Any], list[Dimension]]:
    """Make what is contiguous on both sides one element, so that numpy's inner loop runs over those, not inside one."""
    rest = [dimension for dimension in dimensions if dimension[0] != 1]
    size = itemsize
    while inner := [each for each in rest if each[1] == each[2] == size and size * each[0] <= _WIDEST]:
        rest.remove(inner[0])
        size *= inner[0][0]
    return np.dtype(f"u{size}") if size in _UNSIGNED else np.dtype((np.void, size)), rest


SHORT = 8
"""Bytes of an inner loop that is not worth starting."""
WORTHWHILE = 8 << 10
"""Bytes of a move that is worth a call of its own."""


def _peeled(move: _Move, into: Into) -> Iterator[_Move]:
    """numpy runs its inner loop along the smallest stride of the target. Where that loop is very short (pairs of
    tokens in AMX tiles), one move for each of its steps has a longer one."""
    strides = move.block_strides if into == "blocks" else move.wire_strides
    axis = min(range(len(strides)), key=strides.__getitem__, default=0)
    size = move.element.itemsize
    if len(strides) < 2 or size * move.shape[axis] > SHORT or size * math.prod(_without(move.shape, axis)) < WORTHWHILE:
        yield move
        return
    for step in range(move.shape[axis]):
        yield replace(
            move,
            shape=_without(move.shape, axis),
            block_offset=move.block_offset + step * move.block_strides[axis],
            block_strides=_without(move.block_strides, axis),
            wire_offset=move.wire_offset + step * move.wire_strides[axis],
            wire_strides=_without(move.wire_strides, axis),
        )


def _without(values: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return values[:axis] + values[axis + 1 :]
