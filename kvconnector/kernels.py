"""The compiled loops of re-layout, for one thread that holds no interpreter lock. Needs numba.

One call does all layers, runs and moves of a gather or scatter. The loops follow the table of
`deeplink.kvconnector.jobs`; they know strides only, and trust them: what comes here was checked by
`deeplink.kvconnector.convert`.

numba keeps the machine code on disk. It looks at the age of this file alone, so whoever edits `vectors` while
developing removes that cache (``__pycache__/*.nb?``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from deeplink.kvconnector import vectors as v
from deeplink.kvconnector.jobs import (
    AHEAD,
    COUNT,
    DIMENSIONS,
    ELEMENT,
    FIRST,
    IN_BLOCKS,
    JOIN,
    KIND,
    LANE_STRIDE,
    ON_WIRE,
    PER_BLOCK,
    ROWS,
    SPLIT,
    STREAM,
    TENSOR,
    TRANSPOSE,
    jobs,
)
from deeplink.kvconnector.layout import Bound
from deeplink.kvconnector.moves import Into
from deeplink.kvconnector.plan import Run

Elements = npt.NDArray[Any]
Table = npt.NDArray[np.int64]

_LAST = FIRST + 3 * (DIMENSIONS - 2)
"""First column of the inner loop's two dimensions."""


def _cached(function: Callable[..., Any]) -> Any:
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # numba found no folder to write to
        return njit(nogil=True)(function)


@njit
def _extent(job: Any, dimension: int, count: int) -> int:
    extent = job[FIRST + 3 * dimension]
    return count if extent == COUNT else extent


@njit
def _row(to: int, start: int, size: int) -> None:
    at = 0
    while at + 64 <= size:
        v.move64(to + at, start + at)
        at += 64
    if size & 32:
        v.move32(to + at, start + at)
        at += 32
    if size & 16:
        v.move16(to + at, start + at)
        at += 16
    if size & 8:
        v.move8(to + at, start + at)
        at += 8
    if size & 4:
        v.move4(to + at, start + at)
        at += 4
    if size & 2:
        v.move2(to + at, start + at)
        at += 2
    if size & 1:
        v.move1(to + at, start + at)


@njit
def _lines(to: int, start: int, ahead: int, size: int) -> None:
    """Stream whole lines. The processor looks only so far ahead: four lines a round fit in there more often."""
    at = 0
    while at + 256 <= size:
        for k in range(4):
            v.prefetch(start + at + ahead + k * 64)
        for k in range(4):
            v.stream64(to + at + k * 64, start + at + k * 64)
        at += 256
    while at < size:
        v.prefetch(start + at + ahead)
        v.stream64(to + at, start + at)
        at += 64


@njit
def _rows(
    to: int, start: int, size: int, ahead: int, stream: bool, n: int, n_start: int, n_to: int, m: int, m_start: int, m_to: int
) -> None:
    for i in range(n):
        for j in range(m):
            if stream:
                _lines(to + i * n_to + j * m_to, start + i * n_start + j * m_start, ahead, size)
            else:
                _row(to + i * n_to + j * m_to, start + i * n_start + j * m_start, size)


@njit
def _split(to: int, start: int, lane: int, ahead: int, stream: bool, n: int, n_start: int, n_to: int, m: int, m_start: int, m_to: int) -> None:
    """`n` times `m` lines of pairs become half lines in two rows that are `lane` apart."""
    j = 0
    while j + 2 <= m:
        to_j, start_j = to + j * m_to, start + j * m_start
        later = start_j + (2 * m_start if j + 4 <= m else ahead - j * m_start)
        for i in range(n):
            v.prefetch(later + i * n_start)
            v.prefetch(later + i * n_start + m_start)
            if stream:
                v.split2s(to_j + i * n_to, lane, start_j + i * n_start, m_start)
            elif m_to == 32:
                v.split2(to_j + i * n_to, lane, start_j + i * n_start, m_start)
            else:
                v.split1(to_j + i * n_to, lane, start_j + i * n_start, 0)
                v.split1(to_j + i * n_to + m_to, lane, start_j + i * n_start + m_start, 0)
        j += 2
    if j < m:
        for i in range(n):
            v.split1(to + j * m_to + i * n_to, lane, start + j * m_start + i * n_start, 0)


@njit
def _join(to: int, start: int, lane: int, ahead: int, stream: bool, n: int, n_start: int, n_to: int, m: int, m_start: int, m_to: int) -> None:
    """The reverse: `n` times `m` half lines in two rows become lines of pairs."""
    for i in range(n):
        for j in range(m):
            to_j, start_j = to + i * n_to + j * m_to, start + i * n_start + j * m_start
            v.prefetch(start_j + ahead)
            v.prefetch(start_j + ahead + lane)
            if stream:
                v.joins(to_j, 0, start_j, lane)
            else:
                v.join(to_j, 0, start_j, lane)


NEAR = 8 << 10
"""Bytes to have under way from memory."""


@njit
def _later(i: int, rows: int, n: int, n_start: int, ahead: int) -> int:
    """From row i of a transposition to what should be fetched now: the next rows, or the next transposition's."""
    if n * n_start <= NEAR:
        return ahead
    return rows * n_start if i + 2 * rows <= n else ahead - i * n_start


@njit
def _fetch(later: int, j: int, side: int, rows: int, n_start: int, m_start: int) -> None:
    """The share of the tile at column j in the lines of `rows` rows."""
    if n_start >= v.LINE:
        for k in range(side):
            v.prefetch(later + j * m_start + (j + k) % rows * n_start)
    else:
        for k in range(side):
            v.prefetch(later + (j + k) * v.LINE)


def _transposition(element: int, made: tuple[Any, ...]) -> Any:
    """A loop for elements of this size: `n` rows (contiguous in the target) by `m` columns (in the source)."""
    line, line_streaming, half, half_streaming, smallest, smallest_streaming = made
    side = max(16 // element, 1)
    rows, half_rows = v.LINE // element, v.LINE // element // 2

    @njit
    def loop(to: int, start: int, ahead: int, stream: bool, n: int, n_start: int, m: int, m_start: int, m_to: int) -> None:
        columns = m // side * side
        i = 0
        while i + rows <= n:
            to_i, start_i = to + i * element, start + i * n_start
            later = start_i + _later(i, rows, n, n_start, ahead)
            for j in range(0, columns, side):
                _fetch(later, j, side, rows, n_start, m_start)
                if stream:
                    line_streaming(to_i + j * m_to, m_to, start_i + j * m_start, n_start)
                else:
                    line(to_i + j * m_to, m_to, start_i + j * m_start, n_start)
            i += rows
        if i + half_rows <= n:
            to_i, start_i = to + i * element, start + i * n_start
            later = start_i + _later(i, half_rows, n, n_start, ahead)
            for j in range(0, columns, side):
                _fetch(later, j, side, half_rows, n_start, m_start)
                if stream:
                    half_streaming(to_i + j * m_to, m_to, start_i + j * m_start, n_start)
                else:
                    half(to_i + j * m_to, m_to, start_i + j * m_start, n_start)
            i += half_rows
        while i + side <= n:
            for j in range(0, columns, side):
                if stream:
                    smallest_streaming(to + j * m_to + i * element, m_to, start + i * n_start + j * m_start, n_start)
                else:
                    smallest(to + j * m_to + i * element, m_to, start + i * n_start + j * m_start, n_start)
            i += side
        for k in range(n):
            for j in range(columns if k < i else 0, m):
                _row(to + j * m_to + k * element, start + k * n_start + j * m_start, element)

    return loop


_transpose1 = _transposition(1, v.transpose1)
_transpose2 = _transposition(2, v.transpose2)
_transpose4 = _transposition(4, v.transpose4)
_transpose16 = _transposition(16, v.transpose16)
_transpose32 = _transposition(32, v.transpose32)


@njit
def _inner(job: Any, to: int, start: int, count: int, stream: bool) -> None:
    kind, size, lane, ahead = job[KIND], job[ELEMENT], job[LANE_STRIDE], job[AHEAD]
    n, n_start, n_to = _extent(job, DIMENSIONS - 2, count), job[_LAST + 1], job[_LAST + 2]
    m, m_start, m_to = _extent(job, DIMENSIONS - 1, count), job[_LAST + 4], job[_LAST + 5]
    if kind == TRANSPOSE:
        if size == 2:
            _transpose2(to, start, ahead, stream, n, n_start, m, m_start, m_to)
        elif size == 4:
            _transpose4(to, start, ahead, stream, n, n_start, m, m_start, m_to)
        elif size == 32:
            _transpose32(to, start, ahead, stream, n, n_start, m, m_start, m_to)
        elif size == 16:
            _transpose16(to, start, ahead, stream, n, n_start, m, m_start, m_to)
        else:
            _transpose1(to, start, ahead, stream, n, n_start, m, m_start, m_to)
    elif kind == SPLIT:
        _split(to, start, lane, ahead, stream, n, n_start, n_to, m, m_start, m_to)
    elif kind == JOIN:
        _join(to, start, lane, ahead, stream, n, n_start, n_to, m, m_start, m_to)
    else:
        _rows(to, start, size, ahead, stream, n, n_start, n_to, m, m_start, m_to)


@njit
def _walk(job: Any, to: int, start: int, count: int, stream: bool) -> None:
    """The outer dimensions, and the inner loop for each place in them."""
    a, b, c = _extent(job, 0, count), _extent(job, 1, count), _extent(job, 2, count)
    d, e, f = _extent(job, 3, count), _extent(job, 4, count), _extent(job, 5, count)
    for i in range(a * b * c):
        x, y, z = i // (b * c), i // c % b, i % c
        start_i = start + x * job[FIRST + 1] + y * job[FIRST + 4] + z * job[FIRST + 7]
        to_i = to + x * job[FIRST + 2] + y * job[FIRST + 5] + z * job[FIRST + 8]
        for j in range(d):
            for k in range(e):
                start_k = start_i + j * job[FIRST + 10] + k * job[FIRST + 13]
                to_k = to_i + j * job[FIRST + 11] + k * job[FIRST + 14]
                for n in range(f):
                    _inner(job, to_k + n * job[FIRST + 17], start_k + n * job[FIRST + 16], count, stream)


@_cached
def _copy(
    table: Any,
    groups: Any,
    runs: Any,
    caches: Any,
    wire: int,
    layers: int,
    layer_bytes: int,
    token_bytes: int,
    into_wire: bool,
    stream: bool,
) -> None:
    """`runs` are (block, count, at, group); the jobs of a group are `groups` (first, after the last) of the table."""
    tensors = caches.size // layers
    for layer in range(layers):
        for r in range(runs.shape[0]):
            block, count, at, group = runs[r]
            for j in range(groups[group, 0], groups[group, 1]):
                job = table[j]
                in_blocks = caches[layer * tensors + job[TENSOR]] + job[IN_BLOCKS] + block * job[PER_BLOCK]
                on_wire = wire + layer * layer_bytes + job[ON_WIRE] + at * token_bytes
                if into_wire:
                    _walk(job, on_wire, in_blocks, count, stream and job[STREAM] != 0)
                else:
                    _walk(job, in_blocks, on_wire, count, stream and job[STREAM] != 0)
    if stream:
        v.fence()


STREAMED = 1 << 20
"""Bytes of a target that is better not kept in the caches."""


def copy(caches: Sequence[Elements], bound: Bound, runs: list[Run], wire_LSHTD: Elements, into: Into) -> None:
    """All of a gather or scatter. Everything must have been checked."""
    if not runs or not caches:
        return
    layers, _, _, tokens, dim = wire_LSHTD.shape
    itemsize = wire_LSHTD.itemsize
    table, groups, places = _plan(bound, itemsize, tokens, runs, into)
    bases = np.array([_address(cache) for cache in caches], np.int64)
    wire = _address(wire_LSHTD)
    aligned = wire % v.LINE == 0 if into == "wire" else not (bases % v.LINE).any()
    _copy(
        table,
        groups,
        places,
        bases,
        wire,
        layers,
        wire_LSHTD[0].nbytes,
        dim * itemsize,
        into == "wire",
        aligned and wire_LSHTD.nbytes >= STREAMED,
    )


def _plan(bound: Bound, itemsize: int, tokens: int, runs: list[Run], into: Into) -> tuple[Table, Table, Table]:
    """The table, the rows of it that each group of runs needs, and the runs."""
    shapes: dict[tuple[int, int], int] = {}
    places = np.array(
        [(run.block, run.count, run.at, shapes.setdefault((run.first, run.tokens), len(shapes))) for run in runs],
        np.int64,
    )
    tables = [jobs(bound, itemsize, tokens, first, held, into) for first, held in shapes]
    ends = np.cumsum([0, *map(len, tables)])
    return np.concatenate(tables), np.stack([ends[:-1], ends[1:]], axis=1).astype(np.int64), places


def _address(array: Elements) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
