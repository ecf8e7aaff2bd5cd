"""What the serving side of a transport answers to a push: one status byte, and for an error what it was."""

from __future__ import annotations

import contextlib
import socket
import struct
import time

from deeplink.errors import Corrupted, DeadlineExceeded, PeerGone, ProtocolError, Refused
from deeplink.kvconnector.wires import wire

BODY_SECONDS = 30.0
MAX_ERROR = 1024

_LENGTH = struct.Struct("<H")
_CHECKSUMS = struct.Struct("<QQ")
_OK, _ERROR, _CORRUPTED = b"\x00", b"\x01", b"\x02"


def accept(sock: socket.socket) -> None:
    wire.send(sock, _OK, time.monotonic() + BODY_SECONDS)


def refuse(sock: socket.socket, problem: str) -> ProtocolError:
    """Tell the peer, wait until it has read that and leaves, and return the error that ends the connection here."""
    text = problem.encode()[:MAX_ERROR]
    _tell(sock, _ERROR + _LENGTH.pack(len(text)) + text)
    return ProtocolError(f"a peer pushed where it may not: {problem}")


def corrupted(sock: socket.socket, theirs: int, ours: int) -> Corrupted:
    """As `refuse`, for bytes that are not those that were sent."""
    _tell(sock, _CORRUPTED + _CHECKSUMS.pack(theirs, ours))
    return _mismatch(ours, theirs, "came here are not those that the peer sent")


def expect(sock: socket.socket, deadline: float) -> None:
    """The pushing side: returns when the peer has accepted, raises Refused or Corrupted when it has not."""
    status = wire.receive(sock, 1, deadline)
    if status == _OK:
        return
    if status == _CORRUPTED:
        ours, theirs = _CHECKSUMS.unpack(wire.receive(sock, _CHECKSUMS.size, deadline))
        raise _mismatch(ours, theirs, "came at the peer are not those that were sent")
    if status != _ERROR:
        raise ProtocolError("the peer's transport answered what it may not", field="status", theirs=status.hex())
    (length,) = _LENGTH.unpack(wire.receive(sock, _LENGTH.size, deadline))
    text = wire.receive(sock, min(length, MAX_ERROR), deadline).decode(errors="replace")
    raise Refused(f"the peer's transport refused a push: {text}", field="region")


def expect_some(sock: socket.socket, most: int, deadline: float) -> int:
    """How many pushes the peer has accepted by now, at least one and at most `most`. Raises what `expect` raises."""
    expect(sock, deadline)
    accepted = 1
    if most == 1:
        return 1
    with contextlib.suppress(OSError):  # nothing more yet; or what is wrong, which the next call will say
        said = sock.recv(most, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        others = min(len(said) - len(said.lstrip(_OK)), most - 1)
        if others:
            sock.recv(others)
            accepted += others
    return accepted


def _mismatch(ours: int, theirs: int, what: str) -> Corrupted:
    return Corrupted(f"bytes that {what}", field="checksum", ours=f"{ours:016x}", theirs=f"{theirs:016x}")


def _tell(sock: socket.socket, answer: bytes) -> None:
    wire.send(sock, answer, time.monotonic() + BODY_SECONDS)
    # An early close would destroy the answer; what the peer still sends cannot be trusted to be in step.
    scratch = memoryview(bytearray(64 << 10))
    deadline = time.monotonic() + BODY_SECONDS
    with contextlib.suppress(PeerGone, DeadlineExceeded):
        while True:
            wire.receive_into(sock, scratch, deadline)
