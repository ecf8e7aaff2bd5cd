"""Who reads slowly makes the sender wait, and nothing is gathered in between."""

from __future__ import annotations

import asyncio
import io

from aiohttp import web

from .fake_engine import CHUNKS, FakeEngine, make_contract
from .rig import check, rig, until

EVENT = b'data: {"choices":[{"index":0,"text":"' + b"x" * 65_000 + b'"}]}\n\n'
EVENTS = 400


def test_a_client_that_does_not_read_makes_the_engine_wait() -> None:
    async def test() -> None:
        engine, sent = FakeEngine("e", make_contract("both")), 0

        async def answer(request: web.Request) -> web.StreamResponse:
            nonlocal sent
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for _ in range(EVENTS):
                await response.write(EVENT)
                sent += 1
            await response.write(CHUNKS[-1])
            await response.write_eof()
            return response

        engine.answer = answer
        async with rig(engine) as route:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", int(route.url.rpartition(":")[2]), limit=1 << 16
            )
            body = b'{"prompt":"x","stream":true}'
            head = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(
                body
            )
            writer.write(head + body)
            await until(lambda: sent)
            before = -1
            while before != sent:  # as much as sockets and buffers hold
                before = sent
                await asyncio.sleep(0.3)
            assert sent < EVENTS
            size = 0
            while data := await asyncio.wait_for(reader.read(1 << 20), 5):
                size += data.count(b"x")
            assert size >= EVENTS * 65_000
            assert sent == EVENTS
            writer.close()

    check(test)


def test_an_engine_that_does_not_read_gets_the_whole_body_all_the_same() -> None:
    async def test() -> None:
        engine = FakeEngine("e", make_contract("both"))
        async with rig(engine) as route:
            body = b'{"prompt":"' + b"x" * (8 << 20) + b'"}'
            got = await asyncio.gather(*(route.complete(data=io.BytesIO(body)) for _ in range(3)))
            assert [one.status for one in got] == [200] * 3
            assert [call.raw == body for call in engine.calls] == [True] * 3

    check(test)


def test_many_requests_without_waiting_for_their_answers() -> None:
    async def test() -> None:
        engine = FakeEngine("e", make_contract("both"), delay=0.01)
        async with rig(engine) as route:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(route.url.rpartition(":")[2]))
            asked = 20
            for number in range(asked):
                body = b'{"prompt":"%d","stream":%b}' % (number, b"true" if number % 2 else b"false")
                last = b"Connection: close\r\n" if number == asked - 1 else b""
                head = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\n%bContent-Length: %d\r\n\r\n"
                writer.write(head % (last, len(body)) + body)
            data = await asyncio.wait_for(reader.read(-1), 10)
            assert data.count(b"HTTP/1.1 200 OK") == asked
            assert data.count(b"data: [DONE]") == asked // 2
            assert [call.body["prompt"] for call in engine.calls] == [str(number) for number in range(asked)]
            writer.close()

    check(test)
