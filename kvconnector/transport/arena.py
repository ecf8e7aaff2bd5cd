"""Staging memory that another process of this host may be given to read where it is.

A process that reads another's staging cannot hold it: its owner gives a piece to somebody else when a handoff ends,
whoever is reading. So each piece has a lease, a number beside the memory that its owner raises before the piece can be
used again. Who reads looks at the number afterwards: if it is still the one that was agreed, so are the bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deeplink.errors import DeadlineExceeded, PeerGone, ProtocolError, Refused
from deeplink.kvconnector.wires import wire

LEASES = 4096
_TABLE = LEASES * 8
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MAX_ARENA = 1 << 40

Leases = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Loan:
    """`length` bytes at `offset` of an arena, for as long as the number of `lease` is `generation`."""

    offset: int
    length: int
    lease: int
    generation: int


class Arena:
    """`capacity` bytes, and the leases behind them. Raises OSError where the kernel has no such memory."""

    def __init__(self, capacity: int) -> None:
        size = _whole(capacity) + _TABLE
        self._descriptor = os.memfd_create("deeplink-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._descriptor, size)
            # Memory that could shrink would crash whoever reads it.
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self._memory = memoryview(mmap.mmap(self._descriptor, size))
        except OSError:
            os.close(self._descriptor)
            raise
        self.memory = self._memory[:capacity]
        self.leases: Leases = np.frombuffer(self._memory, np.uint64, LEASES, _whole(capacity))

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.close(self._descriptor)

    def send(self, sock: socket.socket, deadline: float) -> None:
        """Let the peer map it for reading."""
        wire.remaining(deadline)
        # Another description of the same memory, through which nobody can write.
        descriptor = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            socket.send_fds(sock, [b"\1"], [descriptor])
        except OSError as exc:
            raise wire.broken(exc, "the connection broke while sending the staging memory") from exc
        finally:
            os.close(descriptor)


def send_none(sock: socket.socket, deadline: float) -> None:
    """There is nothing to lend."""
    wire.send(sock, b"\0", deadline)


@dataclass(frozen=True, slots=True)
class Lent:
    """A peer's bytes, where they are. What was made of them is good only if they are `intact` afterwards."""

    memory: memoryview
    _leases: Leases
    _lease: int
    _generation: int

    def intact(self) -> bool:
        with _fence:  # what was read before is read before the number, whatever the processor would rather do
            return int(self._leases[self._lease]) == self._generation


_fence = threading.Lock()


class Foreign:
    """A peer's arena, mapped for reading."""

    def __init__(self, descriptor: int) -> None:
        """Takes what it needs of the descriptor, which stays the caller's. Raises ProtocolError."""
        size = os.fstat(descriptor).st_size
        if not _TABLE < size <= MAX_ARENA or size % mmap.PAGESIZE:
            raise ProtocolError(f"staging memory of {size} bytes")
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ProtocolError("the peer's staging memory is not sealed")
        self._memory = memoryview(mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ))
        self._size = size - _TABLE
        self._leases: Leases = np.frombuffer(self._memory, np.uint64, LEASES, self._size)

    def lent(self, loan: Loan) -> Lent:
        """Raises Refused for what is not in it."""
        if loan.offset + loan.length > self._size or loan.lease >= LEASES:
            raise Refused(f"bytes {loan.offset} to {loan.offset + loan.length} of {self._size}", field="region")
        memory = self._memory[loan.offset : loan.offset + loan.length]
        return Lent(memory, self._leases, loan.lease, loan.generation)


def receive(sock: socket.socket, deadline: float) -> Foreign | None:
    """What the peer lends, if it does. Raises ProtocolError for anything that could not be read safely."""
    descriptors: list[int] = []
    try:
        if not wire.readable(sock, wire.remaining(deadline)):
            raise DeadlineExceeded("the peer does not say whether it lends memory")
        data, descriptors, _, _ = socket.recv_fds(sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not data:
            raise PeerGone("the peer closed the connection")
        if data == b"\0":
            return None
        if not descriptors:
            raise ProtocolError("the peer sent no memory")
        return Foreign(descriptors[0])
    except (OSError, ValueError) as exc:
        raise PeerGone(f"the peer's staging memory could not be mapped: {exc}") from exc
    finally:
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _whole(length: int) -> int:
    """In whole pages."""
    return -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
