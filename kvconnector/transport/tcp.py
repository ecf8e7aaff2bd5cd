"""The embedded transport: pushes over plain sockets.

Per push the sender writes a header ``key, offset, length`` and the bytes; a header of length 0 with an all-zero key
asks for an answer. The serving side looks the key up, checks the bounds, and receives straight into the region.
Withdrawing a region that is being written breaks that connection and waits for its thread to let go, so freed
staging is never written late.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Sequence

from deeplink.errors import DeeplinkError, Refused
from deeplink.hookspecs import hookimpl
from deeplink.kvconnector import wire
from deeplink.kvconnector.listener import Listener
from deeplink.kvconnector.transport import answer
from deeplink.kvconnector.transport.base import Capabilities, Link, Push, Region, Transport
from deeplink.kvconnector.transport.regions import KEY_BYTES, Regions

NAME = "tcp"
PURPOSE = "transport-tcp"
IDLE_SECONDS = 24 * 3600.0

_HEADER = struct.Struct("<16sQQ")
_FLUSH = _HEADER.pack(bytes(KEY_BYTES), 0, 0)


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
            answer.expect(sock, deadline)

    def close(self) -> None:
        self._shared.close()


class TcpTransport:
    name = NAME
    capabilities = Capabilities(memory=frozenset({"dram"}), cross_host=True, authenticated=True)

    def __init__(self, host: str, secret: bytes) -> None:
        self._secret = secret
        self._regions = Regions()
        self._listener = Listener(host, secret, PURPOSE, self._serve)

    @property
    def address(self) -> str:
        return self._listener.address

    def register(self, memory: memoryview) -> Region:
        return self._regions.register(memory)

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

    def _serve(self, sock: socket.socket) -> None:
        def interrupt() -> None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

        while True:
            header = wire.receive(sock, _HEADER.size, time.monotonic() + IDLE_SECONDS)
            if header == _FLUSH:
                answer.accept(sock)
                continue
            try:
                with self._regions.writing([_HEADER.unpack(header)], interrupt) as (view,):
                    wire.receive_into(sock, view, time.monotonic() + answer.BODY_SECONDS)
            except Refused as exc:
                raise answer.refuse(sock, exc.message) from exc


@hookimpl
def deeplink_register_transports(register: Callable[[str, Callable[..., Transport]], None]) -> None:
    register(NAME, TcpTransport)
