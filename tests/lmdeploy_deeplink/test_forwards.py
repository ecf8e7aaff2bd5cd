"""Waiting for what an engine had sent to its model."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from deeplink.errors import DeadlineExceeded
from lmdeploy_deeplink.migration import loop_v0_18
from lmdeploy_deeplink.migration.forwards import Forwards, SpreadForwards


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 10))


def test_nothing_was_sent() -> None:
    run(Forwards().passed(0))


def test_it_ends_with_the_last_that_was_sent_before_and_not_later() -> None:
    forwards = Forwards()

    async def wait() -> None:
        forwards.send()
        forwards.send()
        waiting = asyncio.create_task(forwards.passed(5))
        await asyncio.sleep(0)
        forwards.send()
        forwards.end()
        await asyncio.sleep(0)
        assert not waiting.done()
        forwards.end()
        await waiting

    run(wait())


def test_each_waits_for_its_own() -> None:
    forwards = Forwards()

    async def wait() -> None:
        forwards.send()
        first = asyncio.create_task(forwards.passed(5))
        await asyncio.sleep(0)
        forwards.send()
        second = asyncio.create_task(forwards.passed(5))
        await asyncio.sleep(0)
        forwards.end()
        await first
        assert not second.done()
        forwards.end()
        await second

    run(wait())


def test_what_is_dropped_is_over_too() -> None:
    forwards = Forwards()

    async def wait() -> None:
        for _ in range(3):
            forwards.send()
        waiting = asyncio.create_task(forwards.passed(5))
        await asyncio.sleep(0)
        forwards.end(3)
        await waiting
        await forwards.passed(0)

    run(wait())


def test_a_model_that_is_stuck() -> None:
    forwards = Forwards()
    forwards.send()
    with pytest.raises(DeadlineExceeded, match="had sent to its model"):
        run(forwards.passed(0.05))
    forwards.end()
    run(forwards.passed(0))


def test_what_an_engine_sends_its_workers_counts_from_then_on() -> None:
    """Also while the forward before keeps it from being sent: what is in it does not change any more."""

    class Workers:
        asked: list[tuple[Any, ...]]

        def __init__(self) -> None:
            self.asked = []

        def call(self, *asked: Any) -> list[Any]:
            self.asked.append(asked)
            return []

    async def send() -> None:
        workers, gate = Workers(), asyncio.Event()

        async def forward(_: Any) -> None:
            await gate.wait()

        executor = SimpleNamespace(forward_async=forward)
        forwards = SpreadForwards(workers)  # type: ignore[arg-type]
        loop_v0_18.count_sent(executor, forwards)
        sending = asyncio.create_task(executor.forward_async("inputs"))
        await asyncio.sleep(0)
        await forwards.passed(5)
        gate.set()
        await sending
        assert workers.asked == [("passed", 1, 5)]

    run(send())
