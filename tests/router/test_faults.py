"""A thousand requests while engines are killed at random: each ends in an answer or a typed error, counters at zero."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import time
from collections import Counter

import pytest

from deeplink.router.parts import ADMISSION

from .broken_net import Net
from .fake_engine import CHUNKS, FakeEngine, make_contract, running
from .fake_kinds import KINDS, Cache, Kin
from .rig import Got, Rig, rig, router, until

# An engine that is killed while it accepts a connection leaves that to the collector, as a process does to the kernel.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

REQUESTS, AT_A_TIME, DEADLINE = 1000, 16, 3.0


async def kill(engines: list[FakeEngine], dice: random.Random, over: asyncio.Event) -> None:
    """One after the other, each for a moment; a new start is a new epoch. Not to be cancelled: an engine that is half
    stopped would keep its connections."""
    while not over.is_set():
        await asyncio.sleep(dice.uniform(0.02, 0.2))
        engine = dice.choice(engines)
        await engine.stop()
        await asyncio.sleep(dice.uniform(0.0, 0.2))
        engine.restart()
        await engine.start()


def judge(got: Got, streamed: bool) -> str:
    if got.status != 200:
        assert got.status in (502, 503, 504), got.data
        return str(got.error["code"])
    if not streamed:
        assert json.loads(got.data)["choices"], got.data
        return "well"
    if got.data == b"".join(CHUNKS):
        return "well"
    assert b'"decode_failed"' in got.data, got.data
    assert b"[DONE]" not in got.data
    return "broken stream"


async def ask(route: Rig, count: int, ends: Counter[str]) -> None:
    """So many requests, some at a time, every other one streamed; each has ended by its deadline, well or in `judge`'s
    other ways."""
    numbers = list(range(count))

    async def client() -> None:
        while numbers:
            streamed = numbers.pop() % 2 == 0
            began = time.monotonic()
            got = await route.complete({"prompt": "x", "stream": streamed})
            assert time.monotonic() - began < DEADLINE + 2
            ends[judge(got, streamed)] += 1

    await asyncio.gather(*(client() for _ in range(AT_A_TIME)))


@pytest.mark.parametrize("dispatch", ["sequential", "together"])
@pytest.mark.parametrize("kind", ["prefill", "decode", "all"])
def test_engines_killed_at_random(kind: str, dispatch: str) -> None:
    dice = random.Random(f"{kind} {dispatch}")
    engines = [
        FakeEngine(name, make_contract(role), delay=0.01)
        for name, role in (("p0", "prefill"), ("p1", "prefill"), ("d0", "decode"), ("d1", "decode"))
    ]
    victims = [engine for engine in engines if kind in (engine.contract.role, "all")]
    ends: Counter[str] = Counter()

    async def test() -> None:
        section = {"deadline": DEADLINE, "poll": 0.05, "dispatch": dispatch, "breaker_seconds": 0.1}
        async with rig(*engines, **section) as route:
            over = asyncio.Event()
            killer = asyncio.create_task(kill(victims, dice, over))
            await ask(route, REQUESTS, ends)
            over.set()
            await killer
            await until(lambda: route.app[ADMISSION].load.idle)
            assert len(route.app[ADMISSION].queue) == 0

    asyncio.run(asyncio.wait_for(test(), 55))
    gc.collect()
    assert sum(ends.values()) == REQUESTS
    assert ends["well"] > 0.8 * REQUESTS, ends


async def disturb(nets: list[Net], dice: random.Random, over: asyncio.Event) -> None:
    while not over.is_set():
        await asyncio.sleep(dice.uniform(0.02, 0.2))
        await dice.choice(nets).fail(dice)


def test_the_network_broken_at_random() -> None:
    """Between the router and the engines, their control endpoints too: cut, refused, or silent for a moment."""
    dice = random.Random("network")
    engines = [
        FakeEngine(name, make_contract(role), delay=0.01)
        for name, role in (("p0", "prefill"), ("p1", "prefill"), ("d0", "decode"), ("d1", "decode"))
    ]
    ends: Counter[str] = Counter()

    async def test() -> None:
        section = {"deadline": DEADLINE, "poll": 0.05, "breaker_seconds": 0.1}
        async with running(*engines):
            nets = [Net(url) for engine in engines for url in (engine.url, engine.control)]
            for net in nets:
                await net.start()
            for place, engine in enumerate(engines):
                engine.url, engine.control = nets[2 * place].url, nets[2 * place + 1].url
            try:
                async with router(*engines, **section) as route:
                    over = asyncio.Event()
                    breaking = asyncio.create_task(disturb(nets, dice, over))
                    await ask(route, REQUESTS, ends)
                    over.set()
                    await breaking
                    await until(lambda: route.app[ADMISSION].load.idle)
                    assert len(route.app[ADMISSION].queue) == 0
            finally:
                for net in nets:
                    await net.stop()

    asyncio.run(asyncio.wait_for(test(), 55))
    gc.collect()
    assert sum(ends.values()) == REQUESTS
    assert ends["well"] > 0.8 * REQUESTS, ends


@pytest.mark.parametrize("kind", KINDS)
def test_engines_of_other_kinds_killed_at_random(kind: str) -> None:
    """What a killed engine kept is gone with it, and what it was to read ends at the other by a time limit of its own;
    so only the requests' ends are looked at, and that nothing is read twice."""
    dice = random.Random(kind)
    cache = Cache()
    kin = [Kin(name, kind, cache) for name in ("p0", "p1", "d0", "d1")]
    engines = [one.engine for one in kin]
    ends: Counter[str] = Counter()

    async def test() -> None:
        section = {"deadline": DEADLINE, "poll": 0.05, "breaker_seconds": 0.1}
        async with running(*engines):
            for one in kin:
                one.point_at_itself()
                one.open.set()
            async with router(*engines, **section) as route:
                over = asyncio.Event()
                killer = asyncio.create_task(kill(engines, dice, over))
                await ask(route, 300, ends)
                over.set()
                await killer
                await until(lambda: route.app[ADMISSION].load.idle)
        assert not [wrong for wrong in cache.wrong if "second time" in wrong or "by itself" in wrong]

    asyncio.run(asyncio.wait_for(test(), 55))
    gc.collect()
    assert ends["well"] > 0.6 * 300, ends
