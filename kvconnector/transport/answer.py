"""What the serving side of a transport answers to a push: one status byte, and for an error its text."""

from __future__ import annotations

import contextlib
import socket
import struct
import time

from deeplink.errors import DeadlineExceeded, PeerGone, ProtocolError, Refused
from deeplink.kvconnector import wire

BODY_SECONDS = 30.0
MAX_ERROR = 1024

_LENGTH = struct.Struct("<H")
_OK, _ERROR = b"\x00", b"\x01"


def accept(sock: socket.socket) -> None:
    wire.send(sock, _OK, time.monotonic() + BODY_SECONDS)


def refuse(sock: socket.socket, problem: str) -> ProtocolError:
    """Tell the peer, wait until it has read that and leaves, and return the error that ends the connection here."""
    text = problem.encode()[:MAX_ERROR]
    wire.send(sock, _ERROR + _LENGTH.pack(len(text)) + text, time.monotonic() + BODY_SECONDS)
    # An early close would destroy the answer; what the peer still sends cannot be trusted to be in step.
    scratch = memoryview(bytearray(64 << 10))
    deadline = time.monotonic() + BODY_SECONDS
    with contextlib.suppress(PeerGone, DeadlineExceeded):
        while True:
            wire.receive_into(sock, scratch, deadline)
    return ProtocolError(f"a peer pushed where it may not: {problem}")


def expect(sock: socket.socket, deadline: float) -> None:
    """The pushing side: returns when the peer has accepted, raises Refused when it has not."""
    if wire.receive(sock, 1, deadline) == _OK:
        return
    (length,) = _LENGTH.unpack(wire.receive(sock, _LENGTH.size, deadline))
    text = wire.receive(sock, min(length, MAX_ERROR), deadline).decode(errors="replace")
    raise Refused(f"the peer's transport refused a push: {text}", field="region")
