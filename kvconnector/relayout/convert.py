"""Re-layout: copy between an engine's blocks and the wire form, in one pass.

The wire form of a chunk is ``[layer, kv, head, token, dim]``, dense, of the cache's element type; where a cache has
one vector a token, kv and head are 1. Whatever the engine's layout, both are strided views of one logical index
space, so every conversion is an assignment between two views of equal shape: nothing here knows a layout by name.

The copies are done by compiled loops where numba is at hand (the extra ``fast``;
`deeplink.kvconnector.relayout.kernels`), and by numpy elsewhere; the bytes are the same. ``DEEPLINK_RELAYOUT`` =
``numpy`` or ``numba`` insists on one of them.

Tensors carry their axes as a suffix: L layer, S kv (K then V), H head, T token of the chunk, D dim.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from deeplink.errors import LayoutError
from deeplink.kvconnector.layouts.layout import ELEMENTS, Bound
from deeplink.kvconnector.relayout import compiled
from deeplink.kvconnector.relayout.moves import Into, Move, checked, moves, widest
from deeplink.kvconnector.relayout.plan import Chunk, Run, runs

Elements = npt.NDArray[Any]

STORAGE = {1: np.uint8, 2: np.uint16, 4: np.uint32}
"""Elements are moved, never computed with, so any unsigned integer of the right size will do."""


def storage_dtype(dtype: str) -> np.dtype[Any]:
    return np.dtype(STORAGE[ELEMENTS[dtype]])


def wire_shape(bound: Bound, layers: int, tokens: int) -> tuple[int, int, int, int, int]:
    return layers, bound.kv, bound.heads, tokens, bound.head_dim


def gather(
    caches: Sequence[Elements], bound: Bound, where: Iterable[Run], wire_LSHTD: Elements, by: compiled.By | None = None
) -> None:
    """Blocks to wire. `caches` holds the flat arrays of each layer in turn (one, unless the layout says that there are
    several tensors); their element 0 is element 0 of block 0. `by` insists on numpy or numba."""
    copy(caches, bound, where, wire_LSHTD, "wire", by)


def scatter(
    wire_LSHTD: Elements, bound: Bound, where: Iterable[Run], caches: Sequence[Elements], by: compiled.By | None = None
) -> None:
    """Wire to blocks. Writes the elements of these tokens and no others."""
    copy(caches, bound, where, wire_LSHTD, "blocks", by)


def copy(
    caches: Sequence[Elements],
    bound: Bound,
    where: Iterable[Run],
    wire_LSHTD: Elements,
    into: Into,
    by: compiled.By | None = None,
) -> None:
    """`gather` or `scatter`. A wrong plan raises LayoutError, before anything moves."""
    blocks = Blocks.of(caches, bound, wire_LSHTD.dtype, by)
    _check(blocks, wire_LSHTD, into)
    found = checked(where, bound, wire_LSHTD.shape[3])
    if blocks.by_loops:
        from deeplink.kvconnector.relayout import kernels  # takes a moment, and needs numba

        kernels.copy(blocks, found, wire_LSHTD, into)
    else:
        _copy(caches, bound, found, wire_LSHTD, into)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Caches that hold what `bound` says, which is looked at once, however many chunks are copied: `addresses` has the
    one of each, and `by_loops` says whether compiled loops do it."""

    caches: Sequence[Elements]
    bound: Bound
    layers: int
    dtype: np.dtype[Any]
    writeable: bool
    addresses: npt.NDArray[np.int64]
    by_loops: bool
    known: dict[Hashable, Any] = field(default_factory=dict)
    """What compiled loops have worked out for chunks like those so far."""

    @staticmethod
    def of(caches: Sequence[Elements], bound: Bound, dtype: np.dtype[Any], by: compiled.By | None = None) -> Blocks:
        """Raises LayoutError unless the caches can hold what `bound` says."""
        layers = check_caches(caches, bound, dtype)
        addresses = np.array([address(cache) for cache in caches], np.int64)
        writeable = all(cache.flags.writeable for cache in caches)
        return Blocks(caches, bound, layers, dtype, writeable, addresses, compiled.wanted(by))


def copy_chunk(
    blocks: Blocks, table: Sequence[int], chunk: Chunk, origin: int, wire_LSHTD: Elements, into: Into
) -> None:
    """As `copy`, of one chunk's tokens, in the blocks that `table` has for them; the wire begins at token `origin`.
    Little is done for each block but in compiled loops."""
    _check(blocks, wire_LSHTD, into)
    if blocks.by_loops:
        from deeplink.kvconnector.relayout import kernels

        kernels.copy_chunk(blocks, table, chunk, origin, wire_LSHTD, into)
        return
    found = checked(runs(table, blocks.bound.block_size, chunk, origin), blocks.bound, wire_LSHTD.shape[3])
    _copy(blocks.caches, blocks.bound, found, wire_LSHTD, into)


def _check(blocks: Blocks, wire_LSHTD: Elements, into: Into) -> None:
    """Raises LayoutError unless the wire is that of a chunk of these caches, ValueError if the target is read-only."""
    expected = wire_shape(blocks.bound, blocks.layers, wire_LSHTD.shape[3] if wire_LSHTD.ndim == 5 else 0)
    if not wire_LSHTD.flags.c_contiguous or wire_LSHTD.shape != expected or wire_LSHTD.dtype != blocks.dtype:
        raise LayoutError(
            f"a wire chunk must be dense [layer, kv, head, token, dim] {expected} of {blocks.dtype}, "
            f"not {wire_LSHTD.shape} of {wire_LSHTD.dtype}"
        )
    if not (wire_LSHTD.flags.writeable if into == "wire" else blocks.writeable):
        raise ValueError("the target of a copy is read-only")


def address(array: Elements) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def check_caches(caches: Sequence[Elements], bound: Bound, dtype: np.dtype[Any]) -> int:
    """The number of layers. Raises LayoutError unless the caches can hold what `bound` says."""
    layers, rest = divmod(len(caches), bound.tensors)
    if rest:
        raise LayoutError(f"{len(caches)} arrays for layers that have {bound.tensors} tensors each")
    sizes = [bound.elements(tensor) for tensor in range(bound.tensors)]
    for cache, size in zip(caches, sizes * layers, strict=True):
        if cache.ndim != 1 or not cache.flags.c_contiguous or cache.dtype != dtype or cache.size < size:
            raise LayoutError(f"gather and scatter want flat caches of {size} elements of type {dtype}")
    return layers


def _copy(caches: Sequence[Elements], bound: Bound, where: list[Run], wire_LSHTD: Elements, into: Into) -> None:
    """All of it by numpy."""
    tokens, itemsize = wire_LSHTD.shape[3], wire_LSHTD.itemsize
    steps = [
        step
        for run in where
        for move in moves(bound, itemsize, tokens, run.first, run.tokens)
        for step in _peeled(_step(move, run), into)
    ]
    for layer, wire_SHTD in enumerate(wire_LSHTD):
        for step in steps:
            blocks = step.in_blocks(caches[layer * bound.tensors + step.tensor])
            wire = step.on_wire(wire_SHTD)
            np.copyto(*((wire, blocks) if into == "wire" else (blocks, wire)))


@dataclass(frozen=True, slots=True)
class _Step:
    """One assignment of numpy's, the same for every layer. Offsets and strides are in bytes; an `element` is one of
    the cache's, or several that are contiguous on both sides."""

    tensor: int
    element: np.dtype[Any]
    shape: tuple[int, ...]
    block_offset: int
    block_strides: tuple[int, ...]
    wire_offset: int
    wire_strides: tuple[int, ...]

    # numpy checks offset, shape and strides against the buffer once more, whatever has been let through before.
    def in_blocks(self, cache: Elements) -> Elements:
        return np.ndarray(self.shape, self.element, cache.data, self.block_offset, self.block_strides)

    def on_wire(self, wire_SHTD: Elements) -> Elements:
        return np.ndarray(self.shape, self.element, wire_SHTD.data, self.wire_offset, self.wire_strides)


_UNSIGNED = (1, 2, 4, 8)
_WIDEST = 1 << 30
"""Bytes of an element; numpy counts them in an int."""


def _step(move: Move, run: Run) -> _Step:
    dimensions, block_offset, wire_offset = move.of(run)
    # numpy's inner loop is to run over what is contiguous on both sides, not inside it.
    size, rest = widest(dimensions, move.itemsize, _WIDEST)
    return _Step(
        move.tensor,
        np.dtype(f"u{size}") if size in _UNSIGNED else np.dtype((np.void, size)),
        tuple(extent for extent, _, _ in rest),
        block_offset,
        tuple(in_blocks for _, in_blocks, _ in rest),
        wire_offset,
        tuple(on_wire for _, _, on_wire in rest),
    )


SHORT = 8
"""Bytes of an inner loop that is not worth starting."""
WORTHWHILE = 8 << 10
"""Bytes of a step that is worth a call of its own."""


def _peeled(step: _Step, into: Into) -> Iterator[_Step]:
    """numpy runs its inner loop along the smallest stride of the target. Where that loop is very short (pairs of
    tokens in AMX tiles), one step for each of its iterations has a longer one."""
    strides = step.block_strides if into == "blocks" else step.wire_strides
    axis = min(range(len(strides)), key=strides.__getitem__, default=0)
    size = step.element.itemsize
    if len(strides) < 2 or size * step.shape[axis] > SHORT or size * math.prod(_without(step.shape, axis)) < WORTHWHILE:
        yield step
        return
    for at in range(step.shape[axis]):
        yield replace(
            step,
            shape=_without(step.shape, axis),
            block_offset=step.block_offset + at * step.block_strides[axis],
            block_strides=_without(step.block_strides, axis),
            wire_offset=step.wire_offset + at * step.wire_strides[axis],
            wire_strides=_without(step.wire_strides, axis),
        )


def _without(values: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return values[:axis] + values[axis + 1 :]
