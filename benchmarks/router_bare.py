"""The least that a proxy in Python can do, for the router benchmark: what is above it is the router's own work.

    python benchmarks/router_bare.py PORT ENGINE_PORT [ENGINE_PORT …]

Protocols of uvloop, httptools on both sides. It reads a request, sends its body on to the engines in turn, and passes
the answer's bytes as they come. It checks, limits, counts, logs and retries nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from functools import partial

import httptools
import uvloop

HOST = "127.0.0.1"


class Engine(asyncio.Protocol):
    """One connection to an engine."""

    def __init__(self, idle: list[Engine]) -> None:
        self.idle = idle
        self.client: Client | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def ask(self, client: Client, data: bytes) -> None:
        self.client, self.parser = client, httptools.HttpResponseParser(self)
        self.transport.write(data)

    def data_received(self, data: bytes) -> None:
        if self.client is not None:
            self.client.transport.write(data)
            self.parser.feed_data(data)

    def on_message_complete(self) -> None:
        self.client = None
        self.idle.append(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self.idle:
            self.idle.remove(self)
        if self.client is not None:
            self.client.transport.close()


class Client(asyncio.Protocol):
    """One connection of a client."""

    def __init__(self, engines: itertools.cycle[tuple[int, list[Engine]]]) -> None:
        self.engines = engines

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.url, self.body = b"", b""

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        port, idle = next(self.engines)
        head = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        data = head % (self.url, len(self.body)) + self.body
        if idle:
            idle.pop().ask(self, data)
        else:
            self.task = asyncio.get_running_loop().create_task(self.connect(port, idle, data))

    async def connect(self, port: int, idle: list[Engine], data: bytes) -> None:
        _, engine = await asyncio.get_running_loop().create_connection(partial(Engine, idle), HOST, port)
        engine.ask(self, data)


async def main() -> None:
    port, *ports = (int(word) for word in sys.argv[1:])
    engines: itertools.cycle[tuple[int, list[Engine]]] = itertools.cycle([(one, []) for one in ports])
    server = await asyncio.get_running_loop().create_server(partial(Client, engines), HOST, port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
