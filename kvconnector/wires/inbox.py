"""What a peer says on a stream socket, taken in as few calls as it comes in.

Each call costs a waiting thread some microseconds, whatever it brings; messages are small, and often several are there.
"""

from __future__ import annotations

import socket

from deeplink.kvconnector.wires import wire

ROOM = 64 << 10
"""Bytes that are taken at once: many messages, and of a large one no more copies than it has such pieces."""


class Inbox:
    """The bytes of one socket, which nobody else reads any more. One thread takes them."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._room = memoryview(bytearray(ROOM))
        self._start = self._stop = 0

    @property
    def waiting(self) -> bool:
        """Whether bytes are here that nobody has taken."""
        return self._start < self._stop

    def take(self, length: int, deadline: float) -> bytes:
        """The next `length` bytes. Raises what `wire.receive` raises; then some may be lost."""
        start, stop = self._start, self._stop
        if stop - start >= length:
            self._start = start + length
            return bytes(self._room[start : self._start])
        taken = bytearray(self._room[start:stop])
        self._start = self._stop = 0
        while (missing := length - len(taken)) > ROOM:
            taken += self._room[: wire.receive_some(self._sock, self._room, deadline)]
        while missing > 0:
            count = wire.receive_some(self._sock, self._room, deadline)
            taken += self._room[: min(count, missing)]
            self._start, self._stop = min(count, missing), count
            missing -= count
        return bytes(taken)
