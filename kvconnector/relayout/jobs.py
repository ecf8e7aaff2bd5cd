"""Moves as the compiled loops want them: a table of integers, one row per job.

A job says in which order to walk, and which inner loop does the work. That follows from strides alone:

    rows        what is contiguous on both sides is at least one vector: copy it
    transpose   the axis along which the source is contiguous is not the one along which the target is
    split/join  such a transposition of 2 x n elements, which lie together on one side (pairs of tokens in AMX tiles)
    elements    anything else, one element at a time

The walk follows the source, outermost axis first: what is read in order is there when it is wanted, and a target does
not mind in which order whole lines of it are written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from deeplink.kvconnector.layouts.layout import Bound
from deeplink.kvconnector.relayout.moves import Into, Move, moves, widest

Table = npt.NDArray[np.int64]

ROWS, TRANSPOSE, SPLIT, JOIN, ELEMENTS = range(5)
TENSOR, KIND, ELEMENT, IN_BLOCKS, ON_WIRE, PER_BLOCK, LANE_STRIDE, AHEAD, STREAM, FIRST = range(10)
"""Columns of the table; from `FIRST` on, three for each dimension: extent, stride in the source, stride in the
target, the outermost first. The last two are those of the inner loop."""
DIMENSIONS = 8
"""Of a job: the blocks of a run, K and V, and two factors each of head, token and dim."""
COLUMNS = FIRST + 3 * DIMENSIONS
COUNT = -1
"""In place of the extent, of the dimension along a run's blocks."""

LINE = 64
LANE = 16
VECTORS = (1, 2, 4, 16, 32)
"""Bytes of the elements that there is a transposition for."""
SOON = 64 * LINE
"""Bytes to have under way from memory while rows are copied."""
_ANY = 1 << 62


@dataclass(frozen=True, slots=True)
class _Axis:
    """One dimension from the source to the target; `extent` is COUNT for the blocks of a run."""

    extent: int
    start: int
    to: int


_NONE = _Axis(1, 0, 0)


@dataclass(frozen=True, slots=True)
class _Inner:
    """The inner loop and what it runs over. `lane` is the stride between the two that are split or joined, and
    `apart` are the strides in the target that must not break up a vector."""

    kind: int
    axes: tuple[_Axis, ...]
    apart: tuple[int, ...] = ()
    lane: int = 0
    other: tuple[_Axis, ...] = ()
    """Axes that the inner loop steps along by itself."""
    vector: int = LINE
    """Bytes that are streamed at once, if `whole` lines are written one after the other."""
    whole: bool = True


@lru_cache(maxsize=1024)
def jobs(bound: Bound, itemsize: int, wire_tokens: int, first: int, tokens: int, into: Into) -> Table:
    """The rows for a run whose blocks hold `tokens` tokens of the chunk each, from their `first` on. Read-only."""
    found = _paired(moves(bound, itemsize, wire_tokens, first, tokens))
    table = np.array([_job(move, into) for move in found], np.int64).reshape(-1, COLUMNS)
    table.flags.writeable = False
    return table


def _paired(found: tuple[Move, ...]) -> list[Move]:
    """Two moves that differ in their offsets alone (K and V side by side) are one with one more dimension, so that a
    line that holds both is read once."""
    out: list[Move] = []
    for move in found:
        for at, other in enumerate(out):
            in_blocks, on_wire = move.block_offset - other.block_offset, move.wire_offset - other.wire_offset
            same = replace(move, block_offset=other.block_offset, wire_offset=other.wire_offset) == other
            if same and in_blocks > 0 and on_wire > 0:
                out[at] = replace(other, dimensions=((2, in_blocks, on_wire), *other.dimensions))
                break
        else:
            out.append(move)
    return out


def _job(move: Move, into: Into) -> list[int]:
    element, rest = widest(move.dimensions, move.itemsize, _ANY)
    in_blocks, on_wire = move.each_block
    both = [*rest, (COUNT, in_blocks, on_wire)]
    walk = [_Axis(extent, *((a, b) if into == "wire" else (b, a))) for extent, a, b in both]
    walk.sort(key=attrgetter("start"), reverse=True)
    inner = _inner(walk, element)
    outer = [axis for axis in walk if axis not in inner.axes + inner.other]
    axes = [*[_NONE] * (DIMENSIONS - len(outer) - len(inner.axes)), *outer, *inner.axes]
    # What the addresses in the target are multiples of, beside its base.
    steps = (move.wire_offset, move.token_bytes) if into == "wire" else (move.block_offset, in_blocks)
    unit = math.gcd(*steps, *inner.apart, *(axis.to for axis in outer))
    stream = inner.whole and unit % inner.vector == 0
    row = [move.tensor, inner.kind, element, move.block_offset, move.wire_offset, in_blocks]
    row += [inner.lane, _ahead(inner, outer, element), int(stream)]
    return row + [number for axis in axes for number in (axis.extent, axis.start, axis.to)]


def _ahead(inner: _Inner, outer: list[_Axis], element: int) -> int:
    """How far from what is read now lies what is wanted soon."""
    if inner.kind == JOIN:
        return 8 * inner.axes[0].start
    if inner.kind != ROWS:
        return outer[-1].start if outer else 0
    dense = element
    for axis in sorted([*outer, *inner.axes], key=attrgetter("start")):
        if axis.start > dense:  # a gap: some other heads, perhaps, where the processor guesses wrong
            return -(-3 * SOON // dense) * axis.start if dense <= 4 * SOON else SOON
        if axis.extent != COUNT:
            dense *= axis.extent
    return SOON


def _inner(walk: list[_Axis], element: int) -> _Inner:
    """`walk` has the outermost axis first."""
    free = [axis for axis in walk if axis.extent != COUNT]
    source = next((axis for axis in free if axis.start == element), None)
    target = next((axis for axis in free if axis.to == element), None)
    if element >= LINE or (element > LANE and target is None):
        axes = tuple(walk[-2:])
        return _Inner(ROWS, axes, tuple(axis.to for axis in axes), whole=element % LINE == 0)
    if target is None:
        return _Inner(ELEMENTS, tuple(walk[-2:]), whole=False)
    if element in VECTORS and element >= LANE:
        source = source or (_others(free, target) or (_NONE,))[0]
    if source is None:
        return _Inner(ELEMENTS, (*_others(walk, target), target), whole=False)
    if element in VECTORS and min(source.extent, target.extent) * element >= LANE:
        row = target.extent * element
        whole = row % LINE == 0 or (row in (16, 32) and row == source.to and source.extent * row % LINE == 0)
        return _Inner(TRANSPOSE, (target, source), (source.to,), vector=min(row, LINE), whole=whole)
    if element == 2 and source.extent == 2 and target.start == 4 and target.extent % 16 == 0:
        halves = _halves(target, [axis for axis in free if axis.to == 32 and axis is not source])
        pairs = _others(walk, source, target, halves) or (_NONE,)
        whole = halves.extent % 2 == 0
        apart = pairs[0].to, source.to
        return _Inner(SPLIT, (*pairs, halves), apart, source.to, (source, target), whole=whole)
    if element == 2 and target.extent == 2 and source.to == 4 and source.extent % 16 == 0:
        halves = _halves(source, [axis for axis in free if axis.start == 32 and axis is not target])
        pairs = _others(walk, source, target, halves) or (_NONE,)
        return _Inner(JOIN, (*pairs, halves), (pairs[0].to, halves.to), target.start, (source, target))
    return _Inner(ELEMENTS, (source, target), whole=False)


def _halves(axis: _Axis, beside: list[_Axis]) -> _Axis:
    """The axis of the half lines in a row of pairs: 16 steps of `axis` each, or `axis` is just one, beside others."""
    if axis.extent > 16:
        return _Axis(axis.extent // 16, axis.start * 16, axis.to * 16)
    return beside[0] if beside else _NONE


def _others(walk: list[_Axis], *without: _Axis) -> tuple[_Axis, ...]:
    """The innermost axis that is not one of these, if there is one."""
    return tuple([axis for axis in walk if axis not in without][-1:])
