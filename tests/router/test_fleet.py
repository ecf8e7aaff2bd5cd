"""What is known about the engines, and when."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from deeplink import config as configs
from deeplink.config import EngineEntry
from deeplink.router.control import Control
from deeplink.router.fleet import Fleet

from .fake_engine import SECRET, FakeEngine
from .rig import check, pair, running, until


@asynccontextmanager
async def fleet(
    *engines: FakeEngine, secret: bytes = SECRET, poll: float = 60.0, patience: float = 30.0
) -> AsyncIterator[Fleet]:
    entries = [{"name": e.name, "url": e.url, "control": e.control, "kind": e.kind} for e in engines]
    config = configs.parse({"router": {"poll": poll}, "engines": entries}, "test")
    control = Control(secret)
    try:
        async with Fleet(config, control, patience) as made:
            yield made
    finally:
        await control.close()


def seen(made: Fleet) -> dict[str, str]:
    return {engine.name: engine.down for engine in made.table.engines}


def test_engines_are_known_from_the_start() -> None:
    async def test() -> None:
        engines = pair()
        async with running(*engines), fleet(*engines) as made:
            assert seen(made) == {"p": "", "d": ""}
            assert len(made.table.pairs) == 1

    check(test)


def test_polling_sees_an_engine_go_come_back_and_restart() -> None:
    async def test() -> None:
        engines = pair()
        async with running(*engines), fleet(*engines, poll=0.05) as made:
            await engines[0].stop()
            await until(lambda: "cannot connect" in seen(made)["p"])
            assert not made.table.pairs
            assert made.table.engines[0].contract is not None, "its role is remembered"
            await engines[0].start()
            await until(lambda: not seen(made)["p"])
            engines[1].restart()
            await until(lambda: made.table.pairs[0].decode.contract == engines[1].contract)

    check(test)


def test_another_secret_is_said_to_be_that(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        engines = pair()
        async with running(*engines), fleet(*engines, secret=b"another secret, not theirs") as made:
            assert all("secret_file" in down for down in seen(made).values())

    with caplog.at_level(logging.INFO):
        check(test)
    assert "engine p is down" in caplog.text
    assert "another secret" not in caplog.text


def test_an_engine_that_hangs_holds_up_nobody_for_long() -> None:
    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def test() -> None:
        _, consumer = pair()
        silent = FakeEngine("p", consumer.contract)
        server = await asyncio.start_server(hang, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        silent.url = silent.control = f"http://127.0.0.1:{port}"
        async with server, running(consumer):
            began = time.monotonic()
            async with fleet(silent, consumer) as made:
                assert "within 1 s" in seen(made)["p"]
            assert time.monotonic() - began < 3

    check(test)


def test_an_engine_that_computes_before_it_says_that_it_is_well_is_up() -> None:
    """SGLang takes a second for that; and however long one takes, the others are looked at."""

    async def test() -> None:
        slow = FakeEngine("s", pair()[0].contract, kind="plain", ailing=1.3)
        other = pair()[1]
        async with running(slow, other), fleet(slow, other, poll=0.05) as made:
            assert seen(made) == {"s": "", "d": ""}
            slow.ailing = 60.0
            await until(lambda: "within 5 s" in seen(made)["s"], 10)
            await other.stop()
            await until(lambda: "cannot connect" in seen(made)["d"], 1.5)

    check(test)


class Deep(FakeEngine):
    """Its JSON is nested deeper than any reader goes, below a name that nobody reads."""

    async def _status(self, request: web.Request) -> web.Response:
        return web.Response(text='{"x": ' + "[" * 3000 + "]" * 3000 + "}", content_type="application/json")

    _handoff = _stage = _status


def test_an_engine_whose_answers_are_nested_too_deeply_says_nothing() -> None:
    async def test() -> None:
        producer, consumer = pair()
        deep = Deep("p", producer.contract)
        async with running(deep, consumer), fleet(deep, consumer) as made:
            engine = made.table.engines[0]
            assert (engine.down, made.use("p")) == ("", 0.0)
            assert await made.state(engine, "h") is None
            assert await made.stage(engine, "h", 0, time.monotonic() + 5) is None

    check(test)


def test_an_engine_is_given_up_only_after_long_silence() -> None:
    async def test() -> None:
        producer, consumer = pair()
        async with running(producer, consumer), fleet(producer, consumer, poll=0.05, patience=0.3) as made:
            engine = made.table.engines[0]
            await asyncio.sleep(0.4)
            assert made.silent(engine) == ""
            await producer.stop()
            await until(lambda: seen(made)["p"])
            assert made.silent(engine) == ""
            await until(lambda: "no sign of life" in made.silent(engine))
            assert made.silent(engine, heard=time.monotonic()) == ""

    check(test)


def test_a_call_to_an_engine_that_was_removed_ends_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deeplink.router.fleet.REMOVED_SECONDS", 0.2)

    async def test() -> None:
        producer, consumer = pair()
        async with running(producer, consumer), fleet(producer, consumer) as made:
            engine = made.table.engines[0]
            assert made.remove("p")
            assert not made.remove("p")
            assert seen(made) == {"d": ""}
            assert made.silent(engine) == ""
            await until(lambda: "was removed" in made.silent(engine))
            assert made.silent(engine, heard=time.monotonic()) == ""

    check(test)


def test_an_engine_that_moves_while_it_is_looked_for_is_found_where_it_is() -> None:
    async def test() -> None:
        producer, consumer = pair()
        async with running(producer, consumer), fleet(producer) as made:
            looking = asyncio.create_task(made.look())
            await asyncio.sleep(0)
            made.put(EngineEntry(name="p", url=consumer.url, control=consumer.control))
            await made.look()
            assert made.table.engines[0].contract == consumer.contract
            await looking

    check(test)


def test_an_engine_says_how_full_it_is() -> None:
    async def test() -> None:
        producer, consumer = pair()
        producer.held = 40
        async with running(producer, consumer), fleet(producer, consumer, poll=0.05) as made:
            assert (made.use("p"), made.use("d"), made.use("nobody")) == (0.4, 0.0, 0.0)
            assert made.cache_tokens("p") == 1600
            changes = 0

            def changed() -> None:
                nonlocal changes
                changes += 1

            made.on_change = changed
            consumer.held = 50
            await until(lambda: made.use("d") == 0.5)
            assert changes == 1
            await producer.stop()
            await until(lambda: changes == 2)

    check(test)


def test_closing_lets_cancellations_end() -> None:
    async def test() -> None:
        producer, consumer = pair()
        async with running(producer, consumer):
            async with fleet(producer, consumer) as made:
                made.cancel("h1", made.table.engines)
            assert producer.deleted == consumer.deleted == ["h1"]

    check(test)


def test_cancelling_at_an_engine_that_is_gone_is_quiet() -> None:
    async def test() -> None:
        producer, consumer = pair()
        async with running(producer, consumer), fleet(producer, consumer) as made:
            await producer.stop()
            made.cancel("h1", made.table.engines)
            await until(lambda: consumer.deleted)

    check(test)


def test_what_is_not_a_contract_is_a_reason_to_be_down() -> None:
    async def test() -> None:
        producer, consumer = pair()
        made_wrong: Any = producer.contract
        producer.contract = "nonsense"  # type: ignore[assignment]
        async with running(producer, consumer), fleet(producer, consumer, poll=0.05) as made:
            assert "malformed" in seen(made)["p"]
            producer.contract = made_wrong
            await until(lambda: not seen(made)["p"])

    check(test)
