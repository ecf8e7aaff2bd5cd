"""The embedded transport: pushes over plain sockets.

Per push the sender writes a header ``key, offset, length`` and the bytes; a header of length 0 with an all-zero key
asks for an answer, which is one status byte and, for an error, a length-prefixed text. The serving side looks the
key up, checks the bounds, and receives straight into the region. Withdrawing a region that is being written breaks
that connection and waits for its thread to let go, so freed staging is never written late.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from deeplink.errors import DeadlineExceeded, DeeplinkError, PeerGone, ProtocolError, Refused
from deeplink.hookspecs import hookimpl
from deeplink.kvconnector import wire
from deeplink.kvconnector.listener import Listener
from deeplink.kvconnector.transport.base import Capabilities, Link, Push, Region, Transport

NAME = "tcp"
PURPOSE = "transport-tcp"
KEY_BYTES = 16
BODY_SECONDS = 30.0
IDLE_SECONDS = 24 * 3600.0
MAX_ERROR = 1024

_HEADER = struct.Struct("<16sQQ")
_LENGTH = struct.Struct("<H")
_FLUSH = _HEADER.pack(bytes(KEY_BYTES), 0, 0)
_OK, _ERROR = b"\x00", b"\x01"


@dataclass(slots=True)
class _TcpRegion:
    key: bytes
    memory: memoryview
    owner: TcpTransport
    writers: set[socket.socket] = field(default_factory=set)

    def withdraw(self) -> None:
        self.owner.forget(self)


class TcpLink:
    def __init__(self, sock: socket.socket) -> None:
        self._shared = wire.Shared(sock)

    def push(self, pushes: Sequence[Push], deadline: float) -> None:
        with self._shared.use() as sock:
            for push in pushes:
                source = push.source.cast("B")
                wire.send(sock, _HEADER.pack(push.key, push.offset, source.nbytes), deadline)
                wire.send(sock, source, deadline)
            wire.send(sock, _FLUSH, deadline)
            if wire.receive(sock, 1, deadline) == _OK:
                return
            (length,) = _LENGTH.unpack(wire.receive(sock, _LENGTH.size, deadline))
            text = wire.receive(sock, min(length, MAX_ERROR), deadline).decode(errors="replace")
            raise Refused(f"the peer's transport refused a push: {text}", field="region")

    def close(self) -> None:
        self._shared.close()


class TcpTransport:
    name = NAME
    capabilities = Capabilities(memory=frozenset({"dram"}), cross_host=True, authenticated=True)

    def __init__(self, host: str, secret: bytes) -> None:
        self._secret = secret
        self._regions: dict[bytes, _TcpRegion] = {}
        self._changed = threading.Condition()
        self._listener = Listener(host, secret, PURPOSE, self._serve)

    @property
    def address(self) -> str:
        return self._listener.address

    def register(self, memory: memoryview) -> Region:
        region = _TcpRegion(secrets.token_bytes(KEY_BYTES), memory.cast("B"), self)
        with self._changed:
            self._regions[region.key] = region
        return region

    def connect(self, address: str, deadline: float) -> Link:
        sock = wire.connect(address, deadline)
        try:
            wire.greet(sock, self._secret, PURPOSE, server=False, deadline=deadline)
        except DeeplinkError:
            sock.close()
            raise
        return TcpLink(sock)

    def close(self) -> None:
        self._listener.close()

    def forget(self, region: _TcpRegion) -> None:
        with self._changed:
            self._regions.pop(region.key, None)
            for sock in region.writers:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            # The writers' recv returns at once after the shutdown, so this ends; the bound guards against a bug.
            if not self._changed.wait_for(lambda: not region.writers, timeout=BODY_SECONDS):
                raise DeadlineExceeded("a writer did not let go of a withdrawn region")

    def _serve(self, sock: socket.socket) -> None:
        while True:
            header = wire.receive(sock, _HEADER.size, time.monotonic() + IDLE_SECONDS)
            if header == _FLUSH:
                wire.send(sock, _OK, time.monotonic() + BODY_SECONDS)
            elif problem := self._receive(sock, *_HEADER.unpack(header)):
                # The rest of the stream cannot be trusted to be in step, so say why and end it.
                text = problem.encode()[:MAX_ERROR]
                wire.send(sock, _ERROR + _LENGTH.pack(len(text)) + text, time.monotonic() + BODY_SECONDS)
                _drain(sock)
                raise ProtocolError(f"a peer pushed where it may not: {problem}")

    def _receive(self, sock: socket.socket, key: bytes, offset: int, length: int) -> str:
        with self._changed:
            region = self._regions.get(key)
            if region is None:
                return "no region has this key"
            if offset + length > region.memory.nbytes:
                return f"bytes {offset} to {offset + length} of a region of {region.memory.nbytes}"
            region.writers.add(sock)
        try:
            wire.receive_into(sock, region.memory[offset : offset + length], time.monotonic() + BODY_SECONDS)
        finally:
            with self._changed:
                region.writers.discard(sock)
                self._changed.notify_all()
        return ""


def _drain(sock: socket.socket) -> None:
    """Take what the peer sends until it has read the answer and closes: an early close would destroy the answer."""
    scratch = memoryview(bytearray(64 << 10))
    deadline = time.monotonic() + BODY_SECONDS
    with contextlib.suppress(PeerGone, DeadlineExceeded):
        while True:
            wire.receive_into(sock, scratch, deadline)


@hookimpl
def deeplink_register_transports(register: Callable[[str, Callable[..., Transport]], None]) -> None:
    register(NAME, TcpTransport)
