"""Events over real sockets: exact from the beginning, gaps are filled or told, a restart begins anew."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

zmq = pytest.importorskip("zmq")

from deeplink.router.engine import Engine  # noqa: E402
from deeplink.router.kv_index import Index, chain  # noqa: E402
from deeplink.router.kv_listen import Listeners  # noqa: E402
from deeplink.router.parts import ADMISSION  # noqa: E402

from .fake_engine import FakeEngine, make_contract, running  # noqa: E402
from .kv_publisher import Publisher, removed, stored  # noqa: E402
from .rig import check, router, until  # noqa: E402

FIRST, SECOND = list(range(4)), list(range(4, 8))


def held(index: Index, tokens: list[int], name: str = "a") -> int:
    return index.held({4: chain(tokens, 4)}).get(name, 0)


@asynccontextmanager
async def listening(publisher: Publisher, *, replay: bool = True) -> AsyncIterator[tuple[Index, Listeners, Engine]]:
    index = Index()
    listeners = Listeners(index)
    engine = Engine("a", "http://a", "", None, "", events=publisher.events, replay=publisher.replay if replay else "")
    try:
        listeners.set((engine,))
        yield index, listeners, engine
    finally:
        await listeners.close()


async def published(publisher: Publisher, index: Index, seen: Any) -> None:
    """Publishes until it has been heard: a subscription takes a moment."""
    for _ in range(200):
        if seen():
            return
        await publisher.publish()
        await asyncio.sleep(0.02)
    raise AssertionError("nothing was heard")


def test_what_was_published_before_is_replayed_and_then_it_is_exact() -> None:
    async def test() -> None:
        async with Publisher() as publisher:
            await publisher.publish(stored([1, 2], FIRST + SECOND))
            async with listening(publisher) as (index, _, _):
                await until(lambda: not index.why("a"))
                assert held(index, FIRST + SECOND) == 8
                await publisher.publish(removed([2]))
                await published(publisher, index, lambda: held(index, FIRST + SECOND) == 4)
                assert not index.why("a")

    check(test)


def test_an_engine_that_has_published_nothing_is_exact_and_empty() -> None:
    async def test() -> None:
        async with Publisher() as publisher, listening(publisher) as (index, _, _):
            await until(lambda: not index.why("a"))
            await publisher.publish(stored([1], FIRST))
            await published(publisher, index, lambda: held(index, FIRST) == 4)
            assert not index.why("a")

    check(test)


def test_a_gap_is_filled_by_replay() -> None:
    async def test() -> None:
        async with Publisher() as publisher, listening(publisher) as (index, _, _):
            await until(lambda: not index.why("a"))
            await publisher.publish()
            await published(publisher, index, lambda: len(publisher.buffer) > 3)
            await publisher.publish(stored([1], FIRST), silent=True)
            await publisher.publish(stored([2], SECOND, 1))
            await until(lambda: held(index, FIRST + SECOND) == 8)
            assert not index.why("a")
            assert len(publisher.asked) > 1

    check(test)


def test_a_gap_that_cannot_be_filled_is_told_and_what_was_known_forgotten() -> None:
    async def test() -> None:
        async with Publisher() as publisher, listening(publisher) as (index, _, _):
            await published(publisher, index, lambda: not index.why("a"))
            await publisher.publish(stored([1], FIRST))
            await until(lambda: held(index, FIRST) == 4)
            await publisher.publish(removed([1]), silent=True)
            publisher.buffer.clear()
            await publisher.publish(stored([5], SECOND))
            await until(lambda: held(index, SECOND) == 4)
            assert "lost" in index.why("a")
            assert held(index, FIRST) == 0

    check(test)


def test_who_comes_late_without_replay_is_told_so() -> None:
    async def test() -> None:
        async with Publisher() as publisher:
            await publisher.publish(stored([1], FIRST))
            async with listening(publisher, replay=False) as (index, _, _):
                await published(publisher, index, lambda: "before the router listened" in index.why("a"))
                await publisher.publish(stored([5], SECOND))
                await until(lambda: held(index, SECOND) == 4)

    check(test)


def test_a_restart_begins_anew() -> None:
    async def test() -> None:
        async with Publisher() as publisher, listening(publisher) as (index, _, _):
            await until(lambda: not index.why("a"))
            await publisher.publish(stored([1], FIRST))
            await published(publisher, index, lambda: held(index, FIRST) == 4)
            publisher.restart()
            await publisher.publish(stored([1], SECOND))
            await until(lambda: held(index, SECOND) == 4)
            assert held(index, FIRST) == 0
            assert not index.why("a")

    check(test)


def test_what_cannot_be_read_is_told_and_goes_no_further() -> None:
    async def test() -> None:
        async with Publisher() as publisher, listening(publisher) as (index, _, _):
            await until(lambda: not index.why("a"))
            await publisher.publish(raw=b"\xc1 no msgpack")
            await published(publisher, index, lambda: "could not be read" in index.why("a"))
            await publisher._pub.send_multipart([b"one frame"])
            await until(lambda: "three frames" in index.why("a"))
            await publisher.publish(stored([5], SECOND))
            await until(lambda: held(index, SECOND) == 4)

    check(test)


def test_an_engine_that_was_down_is_asked_from_its_beginning() -> None:
    async def test() -> None:
        async with Publisher() as publisher, listening(publisher) as (index, listeners, engine):
            await publisher.publish(stored([1], FIRST))
            await published(publisher, index, lambda: held(index, FIRST) == 4)
            listeners.set((replace(engine, down="it is"),))
            assert "does not answer" in index.why("a")
            assert held(index, FIRST) == 0
            listeners.set((engine,))
            await until(lambda: not index.why("a"))
            assert held(index, FIRST) == 4
            listeners.set(())
            assert "publishes no" in index.why("a")

    check(test)


def test_requests_go_where_their_beginning_is() -> None:
    async def tokenize(request: Any) -> Any:
        from aiohttp import web

        body = await request.json()
        return web.json_response({"tokens": [ord(letter) for letter in body["prompt"]]})

    async def test() -> None:
        async with Publisher() as one, Publisher() as other:
            engines = []
            for name, publisher in (("a", one), ("b", other)):
                engine = FakeEngine(name, make_contract("both"), kind="plain")
                engine.declared = {"events": publisher.events, "replay": publisher.replay}
                engine.others = {"/tokenize": tokenize}
                engines.append(engine)
            text = "the beginning of a prompt"
            await other.publish(stored([1, 2], [ord(letter) for letter in text[:8]]))
            async with running(*engines), router(*engines, decode_policy="exact_prefix") as route:
                index = route.app[ADMISSION].index
                await until(lambda: not index.why("a") and not index.why("b"))
                for prompt in (text, text[:8] + " and another end", [ord(letter) for letter in text]):
                    for _ in range(3):
                        got = await route.complete({"prompt": prompt})
                        assert (got.status, got.headers["x-deeplink-decode"]) == (200, "b")
                asked = [call for engine in engines for call in engine.calls if call.path == "/tokenize"]
                assert len(asked) == 2, "prompts are tokenised once"
                metrics = (await route.get("/metrics")).data.decode()
                assert 'deeplink_engine_cache_exact{engine="b"} 1.0' in metrics
                assert "deeplink_prefix_guesses_total 0.0" in metrics
                for engine in engines:
                    engine.others.clear()
                assert (await route.complete({"prompt": "never seen before"})).status == 200
                assert "deeplink_prefix_guesses_total 1.0" in (await route.get("/metrics")).data.decode()

    check(test)


def test_an_address_that_is_none_is_told() -> None:
    async def test() -> None:
        async with Publisher() as publisher:
            publisher.events = "tcp://no such:1"
            async with listening(publisher) as (index, _, _):
                await until(lambda: "cannot be heard" in index.why("a"))

    check(test)
