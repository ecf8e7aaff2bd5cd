"""Many streams at a time through a router, and the times between their events; prints one line of JSON.

python benchmarks/router_streams.py PORT STREAMS TOKENS [KEY]
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import uvloop

SECONDS = 30.0


class Stream(asyncio.Protocol):
    """One connection with one request. What is left of an event at a read's end is kept to count the next."""

    def __init__(self, request: bytes, gaps: list[float], firsts: list[float]) -> None:
        self.request, self.gaps, self.firsts = request, gaps, firsts
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.tokens, self.last, self.rest = 0, 0.0, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.began = transport, time.perf_counter()
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        now, data = time.perf_counter(), self.rest + data
        count = data.count(b"data: {")
        self.rest = data[-6:]  # shorter than what is counted, so nothing is counted twice
        if count:
            if self.last:
                self.gaps.append(now - self.last)
            else:
                self.firsts.append(now - self.began)
            self.last = now
            self.tokens += count
        if data.endswith(b"0\r\n\r\n"):
            self.transport.close()
            self._end(True)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(False)

    def _end(self, well: bool) -> None:
        if not self.done.done():
            self.done.set_result(well)


def at(values: list[float], share: float) -> float:
    return 1000 * sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


async def main() -> None:
    port, count, tokens = (int(word) for word in sys.argv[1:4])
    key = f"authorization: Bearer {sys.argv[4]}\r\n" if len(sys.argv) > 4 else ""
    content = "word " * 200
    body = json.dumps(
        {"model": "mock", "messages": [{"role": "user", "content": content}], "stream": True, "max_tokens": tokens}
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{key}"
        f"content-length: {len(body)}\r\n\r\n"
    )
    gaps: list[float] = []
    firsts: list[float] = []
    loop, began = asyncio.get_running_loop(), time.perf_counter()
    streams = []
    for _ in range(count):
        made = await loop.create_connection(lambda: Stream(head.encode() + body, gaps, firsts), "127.0.0.1", port)
        streams.append(made[1])
    ended = await asyncio.wait_for(asyncio.gather(*(stream.done for stream in streams)), SECONDS)
    result = {
        "tokens": sum(stream.tokens for stream in streams),
        "failed": ended.count(False),
        "seconds": time.perf_counter() - began,
        "gap_p50": at(gaps, 0.5),
        "gap_p99": at(gaps, 0.99),
        "first_p50": at(firsts, 0.5),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    uvloop.run(main())
