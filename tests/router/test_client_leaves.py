"""A client that leaves ends all that runs for it, in every phase.

Other routers finish the prefill, never call decode, and leave the KV cache pinned until the engine times out.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from .fake_engine import CHUNKS, FakeEngine, make_contract, streams
from .rig import Rig, check, pair, rig, until

ASK = {"prompt": "x", "max_tokens": 9}
STREAM = ASK | {"stream": True}


async def leave(route: Rig, ask: dict[str, Any], engine: FakeEngine) -> None:
    """Sends a request and hangs up once this engine has it."""
    task = asyncio.create_task(route.complete(ask))
    await until(lambda: engine.calls)
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.wait({task})


@pytest.mark.parametrize("ask", [ASK, STREAM])
def test_leaving_during_prefill_ends_prefill_and_never_reaches_decode(ask: dict[str, Any]) -> None:
    async def test() -> None:
        producer, consumer = pair()
        producer.delay = 1.0
        async with rig(producer, consumer) as route:
            await leave(route, ask, producer)
            await until(lambda: producer.calls[0].cancelled, 0.9)
            await until(lambda: producer.deleted == [producer.calls[0].ticket.handoff])
            await asyncio.sleep(0.2)
            assert not consumer.calls

    check(test)


@pytest.mark.parametrize("ask", [ASK, STREAM])
def test_leaving_during_decode_ends_decode(ask: dict[str, Any]) -> None:
    async def test() -> None:
        producer, consumer = pair()
        consumer.delay = 5.0
        async with rig(producer, consumer) as route:
            await leave(route, ask, consumer)
            await until(lambda: consumer.calls[0].cancelled, 2.0)
            handoff = consumer.calls[0].ticket.handoff
            await until(lambda: producer.deleted == consumer.deleted == [handoff])

    check(test)


def test_leaving_during_the_stream_ends_decode() -> None:
    async def test() -> None:
        producer, consumer = pair()
        consumer.answer = streams(*CHUNKS[:1] * 100, CHUNKS[-1], gap=0.05)
        async with rig(producer, consumer) as route:
            async with route.post(STREAM) as response:
                assert await response.content.readany()
                response.close()
            await until(lambda: consumer.calls[0].cancelled, 2.0)
            handoff = consumer.calls[0].ticket.handoff
            await until(lambda: producer.deleted == consumer.deleted == [handoff])

    check(test)


def test_leaving_a_plain_request_ends_it() -> None:
    async def test() -> None:
        engine = FakeEngine("e", make_contract("both"), delay=5.0)
        async with rig(engine) as route:
            await leave(route, ASK, engine)
            await until(lambda: engine.calls[0].cancelled, 2.0)
            assert not engine.deleted

    check(test)
