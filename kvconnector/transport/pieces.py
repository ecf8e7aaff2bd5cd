"""Pushes as a one-sided library wants them: arrays of addresses and lengths, in few and bounded batches. Pure."""

from __future__ import annotations

import ctypes
from array import array
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


@dataclass(frozen=True, slots=True)
class Wanted:
    """Pushes taken apart. `region` is an index into `spans`, `offset` is within that region; empty pushes are left out.

    What takes a look at every push is in two halves, as the owner can be asked between them.
    """

    sources: list[memoryview]
    region: npt.NDArray[np.int64]
    offset: Addresses
    length: Addresses
    spans: list[Span]

    def pieces(self, bases: Sequence[int], source: Addresses) -> Pieces:
        """To the peer's addresses: `bases` has the one of each region's first byte. Neighbours become one piece."""
        target = np.array(bases, np.uint64)[self.region] + self.offset if self.sources else self.offset
        pieces = Pieces(source, target, self.length)
        if (source[1:] < source[:-1]).any():
            order = np.argsort(source, kind="stable")
            pieces = Pieces(source[order], target[order], self.length[order])
        return _merge(pieces)

    def addresses(self) -> Addresses:
        """Where the sources lie."""
        try:
            # A tenth of the time that numpy takes for each, which counts for thousands of pieces.
            found = [_addressof(_from_buffer(source)) for source in self.sources]
        except TypeError:  # one of them is read-only
            found = [address(source) for source in self.sources]
        return _array(found)


_addressof = ctypes.addressof
_from_buffer = ctypes.c_char.from_buffer


def address(memory: memoryview) -> int:
    """Where it lies; 0 when it is empty."""
    if not memory.nbytes:
        return 0
    if memory.readonly:
        return np.frombuffer(memory, np.uint8).ctypes.data
    return _addressof(_from_buffer(memory))


def _array(numbers: list[int]) -> Addresses:
    return np.frombuffer(array("Q", numbers), np.uint64)  # twice as fast as by numpy alone


def read(pushes: Sequence[Push]) -> Wanted:
    """Regions are numbered as they come. A push of no bytes counts for its region's span, which its owner checks."""
    numbers = {key: number for number, key in enumerate(dict.fromkeys([push.key for push in pushes]))}
    sources = [push.source for push in pushes]
    length = _array([source.nbytes for source in sources])
    offset = _array([push.offset for push in pushes])
    if len(numbers) == 1:
        region = np.zeros(len(pushes), np.int64)
    else:
        region = np.array([numbers[push.key] for push in pushes], np.int64)
    stop = offset + length
    spans = [
        Span(key, int(offset[region == number].min()), int(stop[region == number].max()))
        for key, number in numbers.items()
    ]
    if (empty := length == 0).any():
        some = ~empty
        sources = [source for source in sources if source.nbytes]
        region, offset, length = region[some], offset[some], length[some]
    return Wanted(sources, region, offset, length, spans)


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
