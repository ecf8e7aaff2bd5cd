"""Messages on a socket, each after its length: four bytes, little-endian."""

from __future__ import annotations

import socket
import struct

from deeplink.errors import ProtocolError
from deeplink.kvconnector.wires import wire

_LENGTH = struct.Struct("<I")
HEAD = _LENGTH.size


def framed(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def length(head: bytes, limit: int) -> int:
    """How many bytes come after these HEAD. Raises ProtocolError for more than `limit`, before anything is reserved."""
    (said,) = _LENGTH.unpack(head)
    if said > limit:
        raise ProtocolError("a frame larger than the limit", field="length", ours=str(limit), theirs=str(said))
    return int(said)


def receive(sock: socket.socket, limit: int, deadline: float) -> bytes:
    """One message, of `limit` bytes at most. Raises ProtocolError, PeerGone, or DeadlineExceeded."""
    return wire.receive(sock, length(wire.receive(sock, HEAD, deadline), limit), deadline)
