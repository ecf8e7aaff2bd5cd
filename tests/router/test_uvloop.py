"""The same on the loop that a router runs on where it is installed: its connections differ from asyncio's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from . import test_app, test_client_leaves, test_serve, test_slow_readers, test_upstream

uvloop = pytest.importorskip("uvloop")


@pytest.mark.parametrize(
    "test",
    [
        test_app.test_a_far_too_large_body_is_answered,
        test_app.test_more_streams_than_any_pool,
        test_app.test_openai_sdk_sees_typed_errors,
        test_client_leaves.test_leaving_during_the_stream_ends_decode,
        test_client_leaves.test_leaving_a_plain_request_ends_it,
        test_serve.test_a_pipelined_request_is_a_request_of_its_own,
        test_serve.test_a_head_that_does_not_come_ends_the_connection,
        test_serve.test_connections_beyond_the_limit_are_closed,
        test_serve.test_requests_that_run_end_before_the_router_does,
        test_slow_readers.test_a_client_that_does_not_read_makes_the_engine_wait,
        test_slow_readers.test_many_requests_without_waiting_for_their_answers,
        test_upstream.test_nothing_was_sent_or_it_was_lost,
        test_upstream.test_a_closed_reply_says_why,
    ],
)
def test_the_same(monkeypatch: pytest.MonkeyPatch, test: Callable[[], None]) -> None:
    """What is asserted of the router is the test's; here, that it has seen this loop and no other."""
    loops: list[str] = []

    def run(main: Coroutine[Any, Any, Any]) -> Any:
        async def seen() -> Any:
            loops.append(type(asyncio.get_running_loop()).__module__)
            return await main

        return uvloop.run(seen())

    monkeypatch.setattr("asyncio.run", run)
    test()
    assert set(loops) == {"uvloop"}
