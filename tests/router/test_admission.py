"""Which engines a request gets, now or after a wait."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from deeplink.config import RouterSection
from deeplink.errors import NoEngine, Overloaded, PluginError
from deeplink.plugins import load_plugins
from deeplink.router.admission import Admission, Need
from deeplink.router.choice import Pair, Plain
from deeplink.router.prefix import CHUNK, CHUNK_TOKENS, hashes

from .fake_engine import FakeEngine, make_contract
from .rig import check, pair, running, until
from .test_fleet import fleet

POLICIES = load_plugins().policies
SPLIT, WHOLE = Need(handoff=True, tokens=100, output=10), Need(handoff=False, tokens=100, output=10)


@asynccontextmanager
async def admission(*engines: FakeEngine, poll: float = 60.0, **section: Any) -> AsyncIterator[Admission]:
    async with fleet(*engines, poll=poll) as made:
        yield Admission(made, RouterSection(**section), POLICIES)


def both(*names: str) -> list[FakeEngine]:
    return [FakeEngine(name, make_contract("both")) for name in names]


async def plain(made: Admission, need: Need = WHOLE) -> str:
    choice = await made.choose(need)
    assert isinstance(choice, Plain)
    return choice.engine.name


def test_a_request_looks_at_once() -> None:
    async def test() -> None:
        engines = pair()
        async with running(engines[1]):
            await engines[0].start()
            await engines[0].stop()
            async with admission(*engines) as made:
                with pytest.raises(NoEngine):
                    await made.choose(SPLIT)
                await engines[0].start()
                try:
                    assert isinstance(await made.choose(SPLIT), Pair)
                finally:
                    await engines[0].stop()

    check(test)


def test_requests_that_need_an_engine_share_one_look() -> None:
    async def test() -> None:
        producer, consumer = pair(dtype="float16")
        async with running(producer, consumer), admission(producer, consumer) as made:
            before = producer.polls
            tries = [made.choose(SPLIT) for _ in range(50)]
            assert all(isinstance(e, Exception) for e in await asyncio.gather(*tries, return_exceptions=True))
            assert producer.polls == before + 1

    check(test)


def test_load_counts_from_the_choice_on() -> None:
    async def test() -> None:
        engines = [FakeEngine(name, make_contract("prefill" if name < "c" else "decode")) for name in "abcd"]
        async with running(*engines), admission(*engines) as made:
            seen: Counter[tuple[str, str]] = Counter()
            holds = []
            for _ in range(8):
                choice = await made.choose(SPLIT)
                assert isinstance(choice, Pair)
                holds.append(made.take(choice.prefill, SPLIT, prefill=True, decode=False))
                holds.append(made.take(choice.decode, SPLIT, prefill=False, decode=True))
                seen[choice.prefill.name, choice.decode.name] += 1
            assert {name: made.load.of(name).prefill for name in "abcd"} == {"a": 400, "b": 400, "c": 0, "d": 0}
            assert {name: made.load.of(name).decode for name in "abcd"} == {"c": 440, "d": 440, "a": 0, "b": 0}
            for hold in holds:
                hold.end()
                hold.end()
            assert made.load.idle

    check(test)


def test_round_robin_reaches_all_pairs() -> None:
    async def test() -> None:
        engines = [FakeEngine(name, make_contract("prefill" if name < "c" else "decode")) for name in "abcd"]
        policies = {"prefill_policy": "round_robin", "decode_policy": "round_robin"}
        async with running(*engines), admission(*engines, **policies) as made:
            seen: Counter[tuple[str, str]] = Counter()
            for _ in range(8):
                choice = await made.choose(SPLIT)
                assert isinstance(choice, Pair)
                seen[choice.prefill.name, choice.decode.name] += 1
            assert sorted(seen.values()) == [2, 2, 2, 2]

    check(test)


def test_prompts_that_begin_alike_stay_together_until_there_is_too_much_to_do() -> None:
    async def test() -> None:
        engines = both("a", "b")
        async with running(*engines), admission(*engines, decode_policy="prefix") as made:
            assert made.reads_prompts
            need = Need(False, 4 * CHUNK_TOKENS, 0, "", hashes(b"x" * 4 * CHUNK))
            first = await made.choose(need)
            assert isinstance(first, Plain)
            made.take(first.engine, need, prefill=True, decode=False).end()
            assert {await plain(made, need) for _ in range(6)} == {first.engine.name}
            with made.take(first.engine, Need(False, 5 * CHUNK_TOKENS), prefill=True, decode=False):
                assert await plain(made, need) != first.engine.name
            # A restarted engine has an empty cache.
            next(engine for engine in engines if engine.name == first.engine.name).restart()
            await made._fleet.look()
            assert {await plain(made, need) for _ in range(6)} == {"a", "b"}

    check(test)


def test_an_engine_that_is_full_gets_nothing_until_it_is_not() -> None:
    async def test() -> None:
        engines = both("a", "b")
        async with running(*engines), admission(*engines, poll=0.05) as made:
            engines[0].held = 90
            await until(lambda: made.shut())
            assert {await plain(made) for _ in range(6)} == {"b"}
            engines[0].held = 89
            await until(lambda: not made.shut())
            assert {await plain(made) for _ in range(6)} == {"a", "b"}

    check(test)


def test_requests_wait_in_turn_while_all_are_full() -> None:
    async def test() -> None:
        engines = both("a")
        async with running(*engines), admission(*engines, poll=0.05, max_requests=1, queue=3) as made:
            order: list[int] = []

            async def one(number: int) -> None:
                choice = await made.choose(WHOLE)
                assert isinstance(choice, Plain)
                with made.take(choice.engine, WHOLE, prefill=True, decode=True):
                    assert made.load.of("a").requests == 1
                    order.append(number)
                    await asyncio.sleep(0.02)

            tasks = [asyncio.create_task(one(number)) for number in range(4)]
            await asyncio.sleep(0.01)
            with pytest.raises(Overloaded, match="wait already"):
                await made.choose(WHOLE)
            tasks[2].cancel()
            await asyncio.wait(tasks)
            assert order == [0, 1, 3]
            assert made.load.idle
            assert len(made.queue) == 0

    check(test)


def test_nobody_waits_longer_than_allowed() -> None:
    async def test() -> None:
        engines = both("a")
        async with running(*engines), admission(*engines, max_requests=1, queue_seconds=0.1) as made:
            choice = await made.choose(WHOLE)
            assert isinstance(choice, Plain)
            hold = made.take(choice.engine, WHOLE, prefill=True, decode=True)
            with pytest.raises(Overloaded, match=r"0\.1 s"):
                await made.choose(WHOLE)
            hold.end()
            assert await plain(made) == "a"

    check(test)


def test_an_engine_that_fails_is_left_alone_and_tried_again() -> None:
    async def test() -> None:
        engines = both("a", "b")
        async with running(*engines), admission(*engines, breaker_failures=2, breaker_seconds=0.1) as made:
            a = made._fleet.table.engines[0]
            made.failed(a)
            made.failed(a)
            assert "2 requests in a row failed" in made.shut()["a"].why
            assert {await plain(made) for _ in range(6)} == {"b"}
            await asyncio.sleep(0.12)
            hold = made.take(a, WHOLE, prefill=True, decode=True)
            assert "being tried" in made.shut()["a"].why
            hold.end()
            assert not made.shut()
            made.take(a, WHOLE, prefill=True, decode=True)
            made.succeeded(a)
            assert not made.shut()

    check(test)


def test_a_draining_engine_gets_nothing_new() -> None:
    async def test() -> None:
        engines = both("a", "b")
        async with running(*engines), admission(*engines) as made:
            made.draining.add("a")
            assert {await plain(made) for _ in range(6)} == {"b"}
            made.draining.add("b")
            with pytest.raises(NoEngine, match=r"a \(draining\), b \(draining\)"):
                await made.choose(WHOLE)

    check(test)


def test_a_policy_that_nobody_has() -> None:
    async def test() -> None:
        with pytest.raises(PluginError, match=r"no policy named 'best'.*least_load"):
            async with admission(prefill_policy="best"):
                pass

    check(test)
