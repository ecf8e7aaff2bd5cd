"""Pushes as a one-sided library wants them: arrays of addresses and lengths, in few and bounded batches. Pure."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deeplink.kvconnector.transport.base import Push

Addresses = npt.NDArray[np.uint64]
Range = tuple[int, int]
"""Address and length."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """What to copy: `length[i]` bytes at our address `source[i]` to the peer's address `target[i]`; none is empty."""

    source: Addresses
    target: Addresses
    length: Addresses

    def __len__(self) -> int:
        return len(self.length)

    def __getitem__(self, part: slice) -> Pieces:
        return Pieces(self.source[part], self.target[part], self.length[part])


@dataclass(frozen=True, slots=True)
class Span:
    """The hull of all bytes that go into one region: what its owner is asked for."""

    key: bytes
    low: int
    high: int


def address(memory: memoryview) -> int:
    """Where it lies; 0 when it is empty."""
    if not memory.nbytes:
        return 0
    if memory.readonly:
        return np.frombuffer(memory, np.uint8).ctypes.data
    # A tenth of the time that numpy takes, which counts for thousands of pieces.
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def spans(pushes: Sequence[Push]) -> list[Span]:
    """One per region, in the order in which they occur."""
    found: dict[bytes, tuple[int, int]] = {}
    for push in pushes:
        stop = push.offset + push.source.nbytes
        low, high = found.get(push.key, (push.offset, stop))
        found[push.key] = (low if low < push.offset else push.offset, high if high > stop else stop)
    return [Span(key, low, high) for key, (low, high) in found.items()]


def pieces(pushes: Sequence[Push], bases: dict[bytes, int]) -> Pieces:
    """`bases` has the peer's address of each region's first byte. Neighbours on both sides become one piece."""
    pushes = [push for push in pushes if push.source.nbytes]
    count = len(pushes)
    source = np.fromiter((address(push.source) for push in pushes), np.uint64, count)
    target = np.fromiter((bases[push.key] + push.offset for push in pushes), np.uint64, count)
    length = np.fromiter((push.source.nbytes for push in pushes), np.uint64, count)
    order = np.argsort(source, kind="stable")
    return _merge(Pieces(source[order], target[order], length[order]))


def ranges(pieces: Pieces) -> list[Range]:
    """The memory of ours that they read, as few ranges as it can be said in. `pieces` are ordered by source."""
    if not len(pieces):
        return []
    stops = np.maximum.accumulate(pieces.source + pieces.length)
    first = np.flatnonzero(np.concatenate([[True], pieces.source[1:] > stops[:-1]]))
    last = np.concatenate([first[1:], [len(pieces)]]) - 1
    return [
        (start, stop - start) for start, stop in zip(pieces.source[first].tolist(), stops[last].tolist(), strict=True)
    ]


def batches(pieces: Pieces, most_bytes: int, most_pieces: int) -> Iterator[Pieces]:
    """At most so many bytes and pieces at a time; what is larger is cut."""
    pieces = _cut(pieces, most_bytes)
    stops = np.cumsum(pieces.length)
    start = 0
    while start < len(pieces):
        done = int(stops[start - 1]) if start else 0
        stop = int(np.searchsorted(stops, done + most_bytes, side="right"))
        stop = min(max(stop, start + 1), start + most_pieces)
        yield pieces[start:stop]
        start = stop


def _merge(pieces: Pieces) -> Pieces:
    if len(pieces) < 2:
        return pieces
    source, target, length = pieces.source, pieces.target, pieces.length
    apart = (source[:-1] + length[:-1] != source[1:]) | (target[:-1] + length[:-1] != target[1:])
    first = np.concatenate([[0], np.flatnonzero(apart) + 1])
    if len(first) == len(pieces):
        return pieces
    return Pieces(source[first], target[first], np.add.reduceat(length, first))


def _cut(pieces: Pieces, most: int) -> Pieces:
    if not len(pieces) or int(pieces.length.max()) <= most:
        return pieces
    counts = (-(-pieces.length.astype(np.int64) // most)).astype(np.int64)
    index = np.repeat(np.arange(len(pieces)), counts)
    within = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
    offset = (within * most).astype(np.uint64)
    length = np.minimum(pieces.length[index] - offset, np.uint64(most))
    return Pieces(pieces.source[index] + offset, pieces.target[index] + offset, length)
