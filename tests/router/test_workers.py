"""Several workers on one port: what one does all know, and one that is killed leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from .fake_engine import FakeEngine, completion, make_contract, running
from .rig import pair, until
from .worker_rig import MARKS, OPERATOR, WORKERS, Running, check, workers

pytestmark = MARKS


def test_whichever_worker_answers_it_is_one_router(tmp_path: Path) -> None:
    async def test() -> None:
        producer, consumer = pair()
        other = FakeEngine("d2", make_contract("decode", channel="127.0.0.1:43"))
        async with running(producer, consumer, other), workers(tmp_path, producer, consumer) as route:
            await route.complete()
            for number in range(8):
                status, data, path = await route.ask(stream=number % 2 == 0)
                assert (status, path) == (200, "handoff"), data
            metrics = await route.get("/metrics")
            assert 'deeplink_requests_total{path="handoff",status="200"} 8.0' in metrics
            assert 'deeplink_handoffs_total{decode="d",end="done",prefill="p"} 8.0' in metrics
            assert 'deeplink_first_byte_seconds_count{path="handoff"} 8.0' in metrics
            overview = await route.get("/deeplink/v1/overview")
            assert (overview["requests"], overview["ends"]) == (8, {"done": 8})
            # What is said to one worker holds at all.
            assert await route.operate("PUT", "d2", {"url": other.url, "control": other.control}) == 200
            assert await route.operate("POST", "d/drain") == 200
            for _ in range(8):
                assert (await route.ask())[0] == 200
            assert len(other.calls) == 8
            assert await route.operate("POST", "d2/drain") == 200
            statuses = {(await route.ask())[0] for _ in range(6)}
            assert statuses == {503}
            assert 'deeplink_errors_total{code="no_engine"} 6.0' in await route.get("/metrics")
            await route.idle()

    check(test)


def test_all_workers_wait_in_one_queue(tmp_path: Path) -> None:
    """With one request at the engine at a time, whoever serves it."""

    async def test() -> None:
        now = most = 0

        async def answer(request: web.Request) -> web.StreamResponse:
            nonlocal now, most
            now += 1
            most = max(most, now)
            await asyncio.sleep(0.02)
            now -= 1
            return web.json_response(completion())

        engine = FakeEngine("e", make_contract("both"), answer)
        async with running(engine), workers(tmp_path, engine, max_requests=1, queue=12) as route:
            await route.complete()
            got = await asyncio.gather(*(route.ask() for _ in range(24)))
            statuses = Counter(status for status, _, _ in got)
            assert set(statuses) <= {200, 429}
            assert statuses[200] >= 13, statuses
            assert most == 1
            await route.idle()

    check(test)


def test_what_a_killed_worker_had_begun_is_given_up(tmp_path: Path) -> None:
    async def test() -> None:
        producer, consumer = pair()
        hold = asyncio.Event()

        async def answer(request: web.Request) -> web.StreamResponse:
            await hold.wait()
            return web.json_response(completion())

        consumer.answer = answer
        async with running(producer, consumer), workers(tmp_path, producer, consumer) as route:
            await route.complete()
            asking = [asyncio.create_task(route.ask()) for _ in range(6)]
            await until(lambda: len(consumer.calls) == 6)
            for worker in route.workers:
                os.kill(worker, signal.SIGKILL)
            for got in await asyncio.gather(*asking, return_exceptions=True):
                assert isinstance(got, aiohttp.ClientError)
            await route.idle()
            await until(lambda: len(set(producer.deleted)) == len(set(consumer.deleted)) == 6)
            hold.set()
            assert (await route.ask())[0] == 200

    check(test)


def test_workers_end_with_their_owner(tmp_path: Path) -> None:
    """What runs is served to its end; nothing else is, and no process stays."""

    async def test() -> None:
        hold = asyncio.Event()

        async def answer(request: web.Request) -> web.StreamResponse:
            await hold.wait()
            return web.json_response(completion())

        engine = FakeEngine("e", make_contract("both"), answer)
        async with running(engine), workers(tmp_path, engine, killed=True) as route:
            await route.complete()
            found = route.workers
            asking = [asyncio.create_task(route.ask()) for _ in range(4)]
            await until(lambda: len(engine.calls) == 4)
            route.process.kill()
            await asyncio.wait_for(route.process.wait(), 5)
            await asyncio.sleep(0.2)
            hold.set()
            assert [status for status, _, _ in await asyncio.gather(*asking)] == [200] * 4
            await until(lambda: not any(map(alive, found)))

    check(test)


def test_a_page_that_looks_on_does_not_keep_the_router(tmp_path: Path) -> None:
    async def test() -> None:
        engine = FakeEngine("e", make_contract("both"))
        async with running(engine), workers(tmp_path, engine) as route:
            await route.complete()
            async with route.client.get(f"{route.url}/deeplink/v1/overview/stream", headers=OPERATOR) as page:
                assert (await page.content.readline()).startswith(b"data: ")
                route.process.send_signal(signal.SIGTERM)
                await asyncio.wait_for(route.process.wait(), 15)

    check(test)


def alive(pid: int) -> bool:
    """Not merely waiting for somebody to hear of its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_workers_killed_at_random(tmp_path: Path) -> None:
    """A client whose connection breaks before an answer asks again, as OpenAI's does."""
    dice = random.Random(7)
    engines = [
        FakeEngine(name, make_contract(role), delay=0.01)
        for name, role in (("p0", "prefill"), ("p1", "prefill"), ("d0", "decode"), ("d1", "decode"))
    ]
    ends: Counter[str] = Counter()

    async def client(route: Running, numbers: list[int]) -> None:
        while numbers:
            streamed = numbers.pop() % 2 == 0
            for _ in range(10):
                try:
                    status, data, _ = await route.ask(stream=streamed)
                except aiohttp.ClientError:
                    ends["cut"] += 1
                    continue
                if status != 200:
                    assert status in (502, 503, 504), data
                    assert json.loads(data)["error"]["code"]
                ends["well" if status == 200 else "typed"] += 1
                break
            else:
                pytest.fail("a request found no end")

    async def killer(route: Running, over: asyncio.Event) -> int:
        """Few enough that a slow machine starts them again in time."""
        killed = 0
        while not over.is_set() and killed < 6:
            await asyncio.sleep(dice.uniform(0.2, 0.8))
            if len(found := route.workers) == WORKERS:
                os.kill(dice.choice(found), signal.SIGKILL)
                killed += 1
        return killed

    async def test() -> None:
        async with running(*engines), workers(tmp_path, *engines, deadline=5.0) as route:
            over = asyncio.Event()
            killing = asyncio.create_task(killer(route, over))
            numbers = list(range(1000))
            await asyncio.gather(*(client(route, numbers) for _ in range(16)))
            over.set()
            killed = await killing
            await route.idle()
            assert killed >= 2
            assert ends["well"] + ends["typed"] == 1000
            assert ends["well"] >= 980, ends

    check(test)
