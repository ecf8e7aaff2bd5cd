"""One request of a client, answered by the library that serves everything but the engines' paths.

The library sees a connection of its own with this one request on it, so that one address serves both.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from deeplink.router.client import Client
from deeplink.router.head import Head

MAX_BODY = 64 << 10
"""Bytes that such a request may have: it is held whole."""
_DROPPED = frozenset((b"connection", b"content-length", b"expect", b"keep-alive", b"transfer-encoding"))


class Inner(asyncio.Transport):
    """What the library takes for its connection."""

    def __init__(self, client: Client, protocol: asyncio.Protocol, peer: Any) -> None:
        super().__init__({"peername": peer})
        self._client = client
        self._protocol = protocol
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def serve(self, head: Head, body: bytes) -> None:
        """Returns when the answer is out. Cancelled, the library sees its client leave."""
        protocol = self._protocol
        protocol.connection_made(self)
        try:
            protocol.data_received(written(head, body))
            await self._over
        finally:
            self.close()
            protocol.connection_lost(None)

    # What the client calls, which is this answer's reader.

    def pause(self) -> None:
        self._protocol.pause_writing()

    def resume(self) -> None:
        self._protocol.resume_writing()

    # What the library calls.

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self.is_closing():
            self._client.raw(bytes(data), self)

    def is_closing(self) -> bool:
        return self._over.done()

    def close(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    def abort(self) -> None:
        self.close()

    def pause_reading(self) -> None:
        """The whole request is there already."""

    def resume_reading(self) -> None:
        """As above."""

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol


def written(head: Head, body: bytes) -> bytes:
    """The request as the last one of a connection."""
    lines = [b"%b: %b\r\n" % pair for pair in head.pairs if pair[0].lower() not in _DROPPED]
    start = f"{head.method} {head.target} HTTP/1.{int(head.modern)}\r\n".encode("latin-1")
    end = b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    return b"".join((start, *lines, end, body))


async def serve(server: web.Server, head: Head, body: bytes, client: Client) -> None:
    await Inner(client, server(), client.peer).serve(head, body)
