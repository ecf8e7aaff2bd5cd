"""A mock engine that streams, for the router benchmark: asyncio's protocols on uvloop and httptools.

    python benchmarks/router_engine.py MILLISECONDS PORT [PORT …]

Answers a request with `stream` by `max_tokens` events, one write each, that many milliseconds apart; others at once.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from functools import partial
from typing import Any

import httptools
import uvloop

SAYS: dict[str, Any] = {
    "/v1/models": {"object": "list", "data": [{"id": "mock", "object": "model", "owned_by": "vllm"}]},
    "/version": {"version": "0.12.0"},
    "/get_model_info": {"model_path": "mock", "is_generation": True},
    "/model_info": {"model_path": "mock", "is_generation": True},
    "/server_info": {"model_path": "mock", "served_model_name": "mock", "dp_size": 1, "tp_size": 1},
    "/get_server_info": {"model_path": "mock", "served_model_name": "mock", "dp_size": 1, "tp_size": 1},
}
ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "mock",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 200, "completion_tokens": 1, "total_tokens": 201},
}
BEGINS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1764400000,"model":"mock",'
    b'"choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null}]}\n\n'
)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Engine(asyncio.Protocol):
    def __init__(self, gap: float) -> None:
        self.gap = gap
        self.task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.parser = httptools.HttpRequestParser(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.task is not None:
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.body, self.url = b"", b""

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        path = self.url.decode().partition("?")[0]
        asked = json.loads(self.body) if self.body else {}
        if path in SAYS or not asked.get("stream"):
            data = json.dumps(SAYS.get(path, ANSWER)).encode()
            head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
            self.transport.write(head.encode() + data)
        else:
            self.task = asyncio.get_running_loop().create_task(self.stream(asked["max_tokens"]))

    async def stream(self, tokens: int) -> None:
        self.transport.write(BEGINS)
        began = time.perf_counter()
        for number in range(tokens):
            self.transport.write(chunk(EVENT))
            await asyncio.sleep(max(0.0, began + (number + 1) * self.gap - time.perf_counter()) if self.gap else 0)
        self.transport.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def main() -> None:
    gap, ports = float(sys.argv[1]) / 1000, [int(port) for port in sys.argv[2:]]
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(partial(Engine, gap), "127.0.0.1", port, backlog=4096) for port in ports]
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    uvloop.run(main())
