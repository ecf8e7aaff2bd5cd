"""The compiled loops of re-layout: one job of `deeplink.kvconnector.relayout.jobs`, from address to address. Needs
numba.

They know strides only, and trust them: what comes here was checked by `deeplink.kvconnector.relayout.convert`. A loop
reads in the order in which the bytes lie, asks for lines some way ahead (`prefetch`), and writes whole lines; with
`stream` past the caches.
"""

from __future__ import annotations

from typing import Any

from deeplink.kvconnector.relayout import vectors as v
from deeplink.kvconnector.relayout.jit import part
from deeplink.kvconnector.relayout.jobs import (
    COUNT,
    DIMENSIONS,
    ELEMENT,
    FIRST,
    JOIN,
    KIND,
    LANE_STRIDE,
    ROWS,
    SPLIT,
    TRANSPOSE,
)

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
            v.stream256(to + at, start + at)
        else:
            v.move256(to + at, start + at)
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
    if size == 256 and stream:
        # The usual row, 128 elements of 2 bytes: the fewer instructions, the more rows are under way at a time.
        for i in range(n):
            to_i, start_i = to + i * n_to, start + i * n_start
            for j in range(m):
                for k in range(0, 256, 64):
                    v.prefetch(start_i + j * m_start + ahead + k)
                v.stream256(to_i + j * m_to, start_i + j * m_start)
        return
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


SOON = 4 << 10
"""Bytes to have under way from memory while something is transposed."""
STRETCH = 1 << 10
"""Bytes of a row that is long enough to do arithmetic before it."""


@part
def _transpose(
    element: int, to: int, start: int, ahead: int, stream: bool, n: int, n_start: int, m: int, m_start: int, m_to: int
) -> None:
    """`n` rows (contiguous in the target) by `m` columns (in the source) of elements of this size; what will be read
    after them is `ahead` bytes on."""
    side = max(v.LANE // element, 1)
    tiles = m // side
    kind = 0
    if element >= 2:
        kind = 3 if element == 2 else 6 if element == 4 else 9 if element == 16 else 12
    rows = max(v.LINE // element, 1)
    # The later rows of these, or the first of the next.
    soon = n if n * n_start <= 2 * SOON else min(-(-SOON // (rows * n_start)) * rows, n)
    i = 0
    for size in range(3):
        bands = (n - i) // rows
        if bands:
            v.transpose(
                kind + size,
                to + i * element,
                m_to,
                start + i * n_start,
                n_start,
                m_start,
                soon * n_start,
                ahead + (soon - n) * n_start,
                n - soon - i,
                bands,
                tiles,
                stream,
            )
        i += bands * rows
        rows = rows // 2 if size == 0 else side
    for k in range(n):
        for j in range(tiles * side if k < i else 0, m):
            _row(to + j * m_to + k * element, start + k * n_start + j * m_start, element)


@part
def _inner(job: Any, to: int, start: int, count: int, ahead: int, stream: bool) -> None:
    kind, size, lane = job[KIND], job[ELEMENT], job[LANE_STRIDE]
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
def walk(job: Any, to: int, start: int, count: int, ahead: int, stream: bool) -> None:
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
                    _inner(job, to_k + n * job[FIRST + 17], start_k + n * job[FIRST + 16], count, ahead, stream)


@part
def stretches(job: Any, to: int, start: int, count: int, ahead: int, follows: int, stream: bool) -> None:
    """As `walk`, for rows of whole lines that lie one after the other for a while, before a gap.

    The memory's latency at every begin of a few dozen kilobytes is a fifth of the time, so what is asked for at the end
    of a stretch is the begin of the next; `follows` is where the source goes on after this job.
    """
    size, m, m_to = job[ELEMENT], _extent(job, DIMENSIONS - 1, count), job[_LAST + 5]
    total = 1
    for dimension in range(DIMENSIONS - 1):
        total *= _extent(job, dimension, count)
    here, there = start, to
    for step in range(total):
        # Where the next stretch is.
        rest, after, to_after = step + 1, start, to
        for back in range(DIMENSIONS - 1):
            dimension = DIMENSIONS - 2 - back
            extent = _extent(job, dimension, count)
            place = rest % extent
            rest //= extent
            after += place * job[FIRST + 3 * dimension + 1]
            to_after += place * job[FIRST + 3 * dimension + 2]
        end = here + m * size
        jump = (after if step + 1 < total else follows) - end
        for j in range(m):
            near = min(max(end - ahead - here - j * size, 0), size)
            _lines(there + j * m_to, here + j * size, near, ahead, stream)
            _lines(there + j * m_to + near, here + j * size + near, size - near, ahead + jump, stream)
        here, there = after, to_after


@part
def in_stretches(job: Any, count: int, ahead: int) -> Any:
    """Whether a job is one for `stretches`."""
    size, m = job[ELEMENT], _extent(job, DIMENSIONS - 1, count)
    return job[KIND] == ROWS and job[_LAST + 4] == size >= STRETCH and size % 64 == 0 and 0 < ahead < m * size
