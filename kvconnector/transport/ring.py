"""A piece of memory that two processes share, in slots: made by one, sent to the other over their socket.

A ring that a peer could shrink would crash the other side at the next access, hence the seals, which the pusher
checks too. Its pages, 4 MiB per link, are reserved when it is made: a host without memory refuses a link instead of
killing a process. A memfd is not in /dev/shm, so the size a container gives that does not matter.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket

from deeplink.errors import DeadlineExceeded, PeerGone, ProtocolError
from deeplink.kvconnector.wires import wire

SLOT = 1 << 20
SLOTS = 4
"""1 MiB stays in a core's cache between the copy in and the copy out, and is large beside the cost of saying so."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def make() -> int:
    """The descriptor of a new ring; the caller owns it."""
    descriptor = os.memfd_create("deeplink-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, SLOT * SLOTS)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _map(descriptor: int) -> list[memoryview]:
    """The slots of a ring; they stay mapped for as long as one of them is referred to."""
    memory = memoryview(mmap.mmap(descriptor, SLOT * SLOTS))
    return [memory[start : start + SLOT] for start in range(0, SLOT * SLOTS, SLOT)]


def send(sock: socket.socket, deadline: float) -> list[memoryview]:
    """Make a ring, give it to the peer, and map it here."""
    try:
        descriptor = make()
    except OSError as exc:
        raise ProtocolError(f"no memory for a ring: {exc}") from exc
    try:
        wire.remaining(deadline)
        socket.send_fds(sock, [b"\0"], [descriptor])
        return _map(descriptor)
    except OSError as exc:
        raise PeerGone(f"the connection broke while sending the ring: {exc}") from exc
    finally:
        os.close(descriptor)


def receive(sock: socket.socket, deadline: float) -> list[memoryview]:
    """Raises ProtocolError for anything but a ring that nobody can shrink."""
    descriptors: list[int] = []
    try:
        if not wire.readable(sock, wire.remaining(deadline)):
            raise DeadlineExceeded("the peer sends no ring")
        data, descriptors, _, _ = socket.recv_fds(sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not data:
            raise PeerGone("the peer closed the connection")
        if not descriptors:
            raise ProtocolError("the peer sent no ring")
        if os.fstat(descriptors[0]).st_size != SLOT * SLOTS:
            raise ProtocolError("the peer's ring has another size")
        if fcntl.fcntl(descriptors[0], fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ProtocolError("the peer's ring is not sealed")
        return _map(descriptors[0])
    except OSError as exc:
        raise PeerGone(f"the connection broke while receiving the ring: {exc}") from exc
    finally:
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
