"""Bounded memory that peers may touch; an engine's own blocks are never exposed.

One arena per direction. A piece is owned by whoever allocated it until it is released; releasing twice is a bug and
raises. When the arena is full the caller waits, within its deadline, and holds nothing meanwhile.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from bisect import insort
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deeplink.errors import DeadlineExceeded, HandoffError
from deeplink.kvconnector.transport.arena import LEASES, Arena, Loan

ALIGN = 64


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """`length` bytes of the arena, and the extent (aligned) that was reserved for them. `lease` is its place among the
    arena's, if it has one.

    Compared by identity: a later piece at the same place is another piece, and releasing the old one again must not
    free it.
    """

    offset: int
    length: int
    extent: int
    lease: int = -1


def _private(capacity: int) -> memoryview:
    memory = mmap.mmap(-1, capacity)
    # Fewer translations for whoever copies: libraries that copy between processes gain half as much again.
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


class Staging:
    """An arena of `capacity` bytes with first-fit allocation, safe to use from several threads.

    First fit keeps reusing the low addresses, so memory that was never needed is never touched. With `arena`, that is
    the memory, and its pieces can be lent.
    """

    def __init__(self, capacity: int, arena: Arena | None = None) -> None:
        self.capacity = capacity
        self.arena = arena
        self._view = arena.memory if arena is not None else _private(capacity)
        self._address = np.frombuffer(self._view, np.uint8).ctypes.data
        self._leases = list(range(LEASES)) if arena is not None else []
        self._holes = [(0, capacity)]
        self._held: set[Piece] = set()
        self._freed = threading.Condition()

    @property
    def memory(self) -> memoryview:
        """The whole arena, which stays where it is for as long as this lives."""
        return self._view

    @property
    def used(self) -> int:
        """Bytes that are reserved now."""
        with self._freed:
            return sum(piece.extent for piece in self._held)

    def try_allocate(self, length: int, above: int = 0) -> Piece | None:
        """A piece of `length` bytes, or None when there is no room for it now. With `above`, none of it is among the
        first so many bytes."""
        extent = -(-length // ALIGN) * ALIGN
        if extent > self.capacity:
            raise HandoffError(
                "a chunk is larger than the staging memory",
                field="kv.staging",
                ours=str(self.capacity),
                theirs=str(extent),
                remedy="raise kv.staging or lower kv.chunk in deeplink.toml",
            )
        with self._freed:
            return self._take(length, extent, -(-above // ALIGN) * ALIGN)

    def allocate(self, length: int, deadline: float) -> Piece:
        """Wait for room until `deadline` (monotonic seconds); raises DeadlineExceeded."""
        while (piece := self.try_allocate(length)) is None:
            with self._freed:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DeadlineExceeded(
                        f"no room for {length} bytes in staging before the deadline",
                        field="kv.staging",
                        ours=str(self.capacity),
                        remedy="raise kv.staging in deeplink.toml",
                    )
                self._freed.wait(min(left, 0.05))
        return piece

    def release(self, piece: Piece) -> None:
        """Raises KeyError for a piece that is not held: releasing twice is a bug of the caller."""
        with self._freed:
            self._held.remove(piece)
            if self.arena is not None and piece.lease >= 0:
                # Before anybody else can have it: who still reads it must be able to tell.
                self.arena.leases[piece.lease] += np.uint64(1)
                self._leases.append(piece.lease)
            if piece.extent:  # an empty hole could lie inside another and keep its neighbours apart
                insort(self._holes, (piece.offset, piece.extent))
                self._merge()
            self._freed.notify_all()

    def loan(self, view: memoryview) -> Loan | None:
        """What a peer needs to read these bytes where they are; None for bytes that cannot be lent."""
        if self.arena is None or not view.nbytes:
            return None
        at = np.frombuffer(view, np.uint8).ctypes.data - self._address
        with self._freed:
            for piece in self._held:
                if piece.offset <= at and at + view.nbytes <= piece.offset + piece.length and piece.lease >= 0:
                    return Loan(at, view.nbytes, piece.lease, int(self.arena.leases[piece.lease]))
        return None

    def view(self, piece: Piece) -> memoryview:
        """The piece's bytes, writable. Valid until it is released."""
        return self._view[piece.offset : piece.offset + piece.length]

    def array(self, piece: Piece, dtype: np.dtype[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
        return np.frombuffer(self.view(piece), dtype).reshape(shape)

    def _take(self, length: int, extent: int, above: int) -> Piece | None:
        for index, (offset, size) in enumerate(self._holes):
            at, end = max(offset, above), offset + size
            if end - at >= extent:
                left = [(offset, at - offset), (at + extent, end - at - extent)]
                self._holes[index : index + 1] = [hole for hole in left if hole[1]]
                piece = Piece(at, length, extent, self._leases.pop() if self._leases else -1)
                self._held.add(piece)
                return piece
        return None

    def _merge(self) -> None:
        merged = self._holes[:1]
        for offset, size in self._holes[1:]:
            last, length = merged[-1]
            if last + length == offset:
                merged[-1] = (last, length + size)
            else:
                merged.append((offset, size))
        self._holes = merged
