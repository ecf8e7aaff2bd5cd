"""The compiled loops of re-layout, for one thread that holds no interpreter lock. Needs numba.

One call does all layers, runs and moves of a gather or scatter. The loops follow the table of
`deeplink.kvconnector.jobs`; they know strides only, and trust them: what comes here was checked by
`deeplink.kvconnector.convert`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deeplink.kvconnector import vectors as v
from deeplink.kvconnector.jit import part, whole
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


@part
def _extent(job: Any, dimension: int, count: int) -> int:
    extent = job[FIRST + 3 * dimension]
    return count if extent == COUNT else extent


@part
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


@part
def _lines(to: int, start: int, size: int, ahead: int, stream: bool) -> None:
    """Whole lines. The processor looks only so far ahead: four lines a round, and more of them fit in there."""
    at = 0
    while at + 256 <= size:
        for k in range(4):
            v.prefetch(start + at + ahead + k * 64)
        if stream:
            for k in range(4):
                v.stream64(to + at + k * 64, start + at + k * 64)
        else:
            for k in range(4):
                v.move64(to + at + k * 64, start + at + k * 64)
        at += 256
    while at < size:
        v.prefetch(start + at + ahead)
        if stream:
            v.stream64(to + at, start + at)
        else:
            v.move64(to + at, start + at)
        at += 64


@part
def _rows(
    to: int,
    start: int,
    size: int,
    ahead: int,
    stream: bool,
    n: int,
    n_start: int,
    n_to: int,
    m: int,
    m_start: int,
    m_to: int,
) -> None:
    for i in range(n):
        for j in range(m):
            to_j, start_j = to + i * n_to + j * m_to, start + i * n_start + j * m_start
            if size % 64 == 0:
                _lines(to_j, start_j, size, ahead, stream)
            else:
                _row(to_j, start_j, size)


@part
def _split(
    to: int,
    start: int,
    lane: int,
    ahead: int,
    stream: bool,
    n: int,
    n_start: int,
    n_to: int,
    m: int,
    m_start: int,
    m_to: int,
) -> None:
    """`n` times `m` lines of pairs become half lines in two rows that are `lane` apart."""
    j = 0
    while j + 2 <= m:
        to_j, start_j = to + j * m_to, start + j * m_start
        later = start_j + (2 * m_start if j + 4 <= m else ahead - j * m_start)
        for i in range(n):
            v.prefetch(later + i * n_start)
            v.prefetch(later + i * n_start + m_start)
            v.split2(to_j + i * n_to, lane, start_j + i * n_start, m_start, stream)
        j += 2
    if j < m:
        for i in range(n):
            v.split1(to + j * m_to + i * n_to, lane, start + j * m_start + i * n_start, 0, False)


@part
def _join(
    to: int,
    start: int,
    lane: int,
    ahead: int,
    stream: bool,
    n: int,
    n_start: int,
    n_to: int,
    m: int,
    m_start: int,
    m_to: int,
) -> None:
    """The reverse: `n` times `m` half lines in two rows become lines of pairs."""
    for i in range(n):
        for j in range(m):
            to_j, start_j = to + i * n_to + j * m_to, start + i * n_start + j * m_start
            v.prefetch(start_j + ahead)
            v.prefetch(start_j + ahead + lane)
            v.join(to_j, 0, start_j, lane, stream)


NEAR = 8 << 10
"""Bytes to have under way from memory."""


@part
def _later(i: int, rows: int, n: int, n_start: int, ahead: int) -> int:
    """From row i of a transposition to what should be fetched now: the next rows, or the next transposition's."""
    if n * n_start <= NEAR:
        return ahead
    step = -(-NEAR // (2 * rows * n_start)) * rows
    return step * n_start if i + step < n else ahead + (step - n) * n_start


@part
def _band(
    i: int,
    kind: int,
    element: int,
    rows: int,
    to: int,
    start: int,
    ahead: int,
    stream: bool,
    n: int,
    n_start: int,
    tiles: int,
    m_start: int,
    m_to: int,
) -> int:
    """As many bands of `rows` rows of the source as there are from row i on; the row it got to."""
    while i + rows <= n:
        to_i, start_i = to + i * element, start + i * n_start
        later = start_i + _later(i, rows, n, n_start, ahead)
        v.transpose(kind, to_i, m_to, start_i, n_start, m_start, later, tiles, stream)
        i += rows
    return i


@part
def _transpose(
    element: int, to: int, start: int, ahead: int, stream: bool, n: int, n_start: int, m: int, m_start: int, m_to: int
) -> None:
    """`n` rows (contiguous in the target) by `m` columns (in the source) of elements of this size."""
    side = max(v.LANE // element, 1)
    columns = m // side * side
    kind = 0
    if element >= 2:
        kind = 3 if element == 2 else 6 if element == 4 else 9 if element == 16 else 12
    rows = v.LINE // element
    i = 0
    for size in range(3):
        i = _band(i, kind + size, element, rows, to, start, ahead, stream, n, n_start, m // side, m_start, m_to)
        rows = rows // 2 if size == 0 else side
    for k in range(n):
        for j in range(columns if k < i else 0, m):
            _row(to + j * m_to + k * element, start + k * n_start + j * m_start, element)


@part
def _inner(job: Any, to: int, start: int, count: int, stream: bool) -> None:
    kind, size, lane, ahead = job[KIND], job[ELEMENT], job[LANE_STRIDE], job[AHEAD]
    n, n_start, n_to = _extent(job, DIMENSIONS - 2, count), job[_LAST + 1], job[_LAST + 2]
    m, m_start, m_to = _extent(job, DIMENSIONS - 1, count), job[_LAST + 4], job[_LAST + 5]
    if kind == TRANSPOSE:
        _transpose(size, to, start, ahead, stream, n, n_start, m, m_start, m_to)
    elif kind == SPLIT:
        _split(to, start, lane, ahead, stream, n, n_start, n_to, m, m_start, m_to)
    elif kind == JOIN:
        _join(to, start, lane, ahead, stream, n, n_start, n_to, m, m_start, m_to)
    else:
        _rows(to, start, size, ahead, stream, n, n_start, n_to, m, m_start, m_to)


@part
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


@part
def copy_layer(
    table: Any,
    groups: Any,
    runs: Any,
    first_run: int,
    last_run: int,
    caches: Any,
    first_cache: int,
    wire: int,
    token_bytes: int,
    into_wire: bool,
    stream: bool,
) -> None:
    """Runs [first_run, last_run) of one layer. `runs` are (block, count, at, group); the jobs of a group are `groups`
    (first, after the last) of the table."""
    for r in range(first_run, last_run):
        block, count, at, group = runs[r]
        for j in range(groups[group, 0], groups[group, 1]):
            job = table[j]
            in_blocks = caches[first_cache + job[TENSOR]] + job[IN_BLOCKS] + block * job[PER_BLOCK]
            on_wire = wire + job[ON_WIRE] + at * token_bytes
            to, start = (on_wire, in_blocks) if into_wire else (in_blocks, on_wire)
            _walk(job, to, start, count, stream and job[STREAM] != 0)


@whole
def copy_layers(
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
    tensors = caches.size // layers
    for layer in range(layers):
        copy_layer(
            table,
            groups,
            runs,
            0,
            runs.shape[0],
            caches,
            layer * tensors,
            wire + layer * layer_bytes,
            token_bytes,
            into_wire,
            stream,
        )
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
    table, groups, places = plan(bound, itemsize, tokens, runs, into)
    bases = np.array([address(cache) for cache in caches], np.int64)
    wire = address(wire_LSHTD)
    aligned = wire % v.LINE == 0 if into == "wire" else not (bases % v.LINE).any()
    copy_layers(
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


def plan(bound: Bound, itemsize: int, tokens: int, runs: list[Run], into: Into) -> tuple[Table, Table, Table]:
    """The table, the rows of it that each group of runs needs, and the runs."""
    shapes: dict[tuple[int, int], int] = {}
    places = np.array(
        [(run.block, run.count, run.at, shapes.setdefault((run.first, run.tokens), len(shapes))) for run in runs],
        np.int64,
    )
    tables = [jobs(bound, itemsize, tokens, first, held, into) for first, held in shapes]
    ends = np.cumsum([0, *map(len, tables)])
    return np.concatenate(tables), np.stack([ends[:-1], ends[1:]], axis=1).astype(np.int64), places


def address(array: Elements) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
