"""The handoff and plain flows, and every way they fail."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

import msgspec
import pytest
from aiohttp import web

from deeplink.config import EngineEntry
from deeplink.errors import Reason
from deeplink.kvconnector.contracts.contract import Contract
from deeplink.kvconnector.handoffs.handoff import BEGUN, COMPLETE, NOT_BEGUN
from deeplink.router.parts import ADMISSION, FLEET

from .fake_engine import (
    CHUNKS,
    FakeEngine,
    Handler,
    answers,
    completion,
    cut_short,
    dies,
    make_contract,
    streams,
)
from .rig import Got, check, pair, rig, router, running, until

ASK = {"prompt": "x", "max_tokens": 9}
STREAM = ASK | {"stream": True}
LOST = Reason("peer_gone", "the connection to p broke", remedy="look at p's log")


async def cancelled_on(got: Got, *engines: FakeEngine) -> None:
    """Waits until these engines were told to cancel this answer's handoff."""
    handoff = got.headers["x-deeplink-handoff"]
    await until(lambda: all(handoff in engine.deleted for engine in engines))


# The handoff.


def test_handoff_calls_prefill_then_decode_with_one_ticket() -> None:
    async def test() -> None:
        producer, consumer = pair()
        async with rig(producer, consumer) as route:
            got = await route.complete(ASK)
            assert got.status == 200, got.data
            assert json.loads(got.data) == completion()
            assert got.headers["x-deeplink-path"] == "handoff"
            assert got.headers["x-deeplink-prefill"] == "p"
            assert got.headers["x-deeplink-decode"] == "d"
            assert got.headers["x-request-id"] == "r-1"
            (first,), (second,) = producer.calls, consumer.calls
            assert first.part["side"] == "produce"
            assert second.part["side"] == "consume"
            assert first.part["ticket"] == second.part["ticket"]
            assert first.ticket.handoff == got.headers["x-deeplink-handoff"]
            assert first.ticket.producer == producer.contract.epoch
            assert first.ticket.consumer == consumer.contract.epoch
            assert first.ticket.channels == ("127.0.0.1:41",)
            assert first.ticket.milliseconds == 120_000
            assert first.body["max_tokens"] == 1
            assert first.body["stream"] is False
            assert second.body["max_tokens"] == 9
            await asyncio.sleep(0.1)
            assert not producer.deleted
            assert not consumer.deleted

    check(test)


def test_chat_is_handed_over_too() -> None:
    async def test() -> None:
        producer, consumer = pair()
        async with rig(producer, consumer) as route:
            ask = {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 9}
            got = await route.complete(ask, "/v1/chat/completions")
            assert got.status == 200
            assert [call.path for call in producer.calls + consumer.calls] == ["/v1/chat/completions"] * 2
            assert producer.calls[0].body["max_completion_tokens"] == 1
            assert "max_tokens" not in producer.calls[0].body

    check(test)


def test_stream_bytes_are_untouched() -> None:
    async def test() -> None:
        producer, consumer = pair()
        async with rig(producer, consumer) as route:
            got = await route.complete(STREAM)
            assert got.data == b"".join(CHUNKS)
            assert got.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert got.headers["x-deeplink-path"] == "handoff"
            await asyncio.sleep(0.1)
            assert not producer.deleted

    check(test)


def test_events_are_passed_on_as_they_come() -> None:
    async def test() -> None:
        producer, consumer = pair()
        consumer.answer = streams(*CHUNKS, gap=0.3)
        async with rig(producer, consumer) as route, route.post(STREAM) as response:
            began = time.monotonic()
            assert await response.content.readany() == CHUNKS[0]
            assert time.monotonic() - began < 0.25
            assert await response.content.read() == CHUNKS[1] + CHUNKS[2]

    check(test)


def test_a_slow_client_holds_the_engine_back() -> None:
    """Nothing between engine and client gathers what the client does not read."""
    event = b"data: " + b"x" * 65536 + b"\n\n"
    sent = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(1000):
            await response.write(event)
            sent += len(event)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def test() -> None:
        producer, consumer = pair()
        consumer.answer = answer
        async with rig(producer, consumer) as route, route.post(STREAM) as response:
            assert response.status == 200
            before = -1
            while before != sent:
                before = sent
                await asyncio.sleep(0.3)
            assert sent < 40 << 20
            data = await response.content.read()
            assert len(data) == 1000 * len(event) + len(b"data: [DONE]\n\n")

    check(test)


# The plain path.


@pytest.mark.parametrize(
    "more",
    [{"n": 2}, {"best_of": 2}, {"prompt": ["x", "y"]}, {"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}],
)
def test_what_cannot_be_handed_over_goes_to_decode_alone(more: dict[str, Any]) -> None:
    async def test() -> None:
        producer, consumer = pair()
        async with rig(producer, consumer) as route:
            raw = json.dumps(ASK | more, indent=1).encode()
            got = await route.complete(data=raw, headers={"Content-Type": "application/json"})
            assert got.status == 200
            assert got.headers["x-deeplink-path"] == "plain"
            assert got.headers["x-deeplink-decode"] == "d"
            assert "x-deeplink-prefill" not in got.headers
            assert "x-deeplink-handoff" not in got.headers
            assert consumer.calls[0].raw == raw
            assert not producer.calls

    check(test)


def test_what_cannot_be_handed_over_is_not_when_such_engines_come_while_it_waits() -> None:
    async def test() -> None:
        engine = FakeEngine("e", make_contract("both"), kind="plain", delay=0.5)
        producer, consumer = pair()
        async with running(producer, consumer), rig(engine, max_requests=1, queue=4) as route:
            first = asyncio.create_task(route.complete(ASK))
            await until(lambda: engine.calls)
            second = asyncio.create_task(route.complete(ASK | {"n": 2}))
            await until(lambda: len(route.app[ADMISSION].queue))
            for one in (producer, consumer):
                route.app[FLEET].put(EngineEntry(name=one.name, url=one.url, control=one.control))
            await route.app[FLEET].look()
            third = await route.complete(ASK)
            assert (third.status, third.headers["x-deeplink-path"]) == (200, "handoff")
            for got in await asyncio.gather(first, second):
                assert (got.status, got.headers["x-deeplink-path"]) == (200, "plain")
            assert [call.body.get("n") for call in producer.calls] == [None]

    check(test)


def test_one_engine_gets_the_very_bytes() -> None:
    async def test() -> None:
        engine = FakeEngine("e", make_contract("both"))
        raw = b' {"prompt" : "caf\xc3\xa9", "unknown":1.0, "unknown":1e2}\n'
        async with rig(engine) as route:
            got = await route.complete(data=raw)
            assert got.status == 200
            assert engine.calls[0].raw == raw
            assert engine.calls[0].headers["Content-Type"] == "application/octet-stream"

    check(test)


@pytest.mark.parametrize("name", ["kv_transfer_params", "kv\\u005ftransfer_params"])
def test_a_clients_params_reach_no_engine(name: str) -> None:
    async def test() -> None:
        raw = f'{{"prompt":"x","{name}":{{"deeplink":{{"side":"consume","ticket":"forged"}}}}}}'.encode()
        lone = FakeEngine("e", make_contract("both"))
        async with rig(lone) as route:
            assert (await route.complete(data=raw)).status == 200
            assert lone.calls[0].body == {"prompt": "x"}
        producer, consumer = pair()
        async with rig(producer, consumer) as route:
            assert (await route.complete(data=raw)).status == 200
            for engine in (producer, consumer):
                assert engine.calls[0].ticket.consumer == consumer.contract.epoch
                assert b"forged" not in engine.calls[0].raw

    check(test)


@pytest.mark.parametrize(("status", "body"), [(500, None), (429, None), (404, b'{"a": 1}')])
def test_plain_answers_pass_as_they_are(status: int, body: bytes | None) -> None:
    async def test() -> None:
        engine = FakeEngine("e", make_contract("both"), answers(status, body, Retry_After="7"))
        async with rig(engine) as route:
            got = await route.complete(ASK)
            assert got.status == status
            assert got.data == (body or b'{"error": {"message": "no"}}')
            assert got.headers["retry-after"] == "7"

    check(test)


def test_engines_of_any_kind_serve_beside_others() -> None:
    """An OpenAI endpoint without a control endpoint is asked for its health, and never gets a ticket or the token."""

    async def test() -> None:
        one, other = (FakeEngine(name, make_contract("both"), kind="plain") for name in "xy")
        async with running(one, other), router(one, other) as route:
            await one.stop_control()
            for _ in range(4):
                got = await route.complete(ASK)
                assert (got.status, got.headers["x-deeplink-path"]) == (200, "plain")
            assert one.calls
            assert other.calls
            assert not one.polls + other.polls
            assert not [headers for headers in one.health_headers if "Authorization" in headers]
            other.well = False
            await asyncio.sleep(0.3)
            for _ in range(3):
                assert (await route.complete(ASK)).headers["x-deeplink-decode"] == "x"
            health = json.loads((await route.get("/health")).data)
            assert health["engines"] == {"x": {"up": True, "role": "both"}, "y": {"up": False, "role": "both"}}
        producer, consumer = pair()
        async with rig(producer, consumer, one) as route:
            paths = [(await route.complete(ASK)).headers["x-deeplink-path"] for _ in range(3)]
            assert paths == ["handoff"] * 3
            seen = {(await route.complete(ASK | {"n": 2})).headers["x-deeplink-decode"] for _ in range(4)}
            assert seen == {"d", "x"}

    check(test)


# Refusals.


def test_a_pair_that_refuses_is_an_error_that_names_the_field() -> None:
    async def test() -> None:
        producer, consumer = pair(dtype="float16")
        async with rig(producer, consumer) as route:
            began = time.monotonic()
            got = await route.complete(ASK)
            assert time.monotonic() - began < 2
            assert got.status == 503
            assert got.error["code"] == "contract_refused"
            assert got.error["field"] == "groups[0].dtype"
            assert (got.error["ours"], got.error["theirs"]) == ("bfloat16", "float16")
            assert "groups[0].dtype" in got.error["message"]
            assert got.error["remedy"]
            assert not producer.calls
            assert not consumer.calls

    check(test)


@pytest.mark.parametrize("index", [0, 1])
def test_without_one_side_there_is_no_answer(index: int) -> None:
    async def test() -> None:
        engines = pair()
        async with running(*engines), router(*engines) as route:
            await engines[index].stop()
            began = time.monotonic()
            got = await route.complete(ASK)
            assert time.monotonic() - began < 2
            assert got.status == 503, got.data
            assert got.error["code"] == "no_engine"
            assert engines[index].name in got.error["message"]
            assert not engines[1 - index].calls or index == 1

    check(test)


# Failures of prefill.


@pytest.mark.parametrize("status", [400, 404, 429])
def test_what_the_client_did_wrong_is_the_engines_to_say(status: int) -> None:
    async def test() -> None:
        producer, consumer = pair()
        producer.answer = answers(status, b'{"error": {"message": "too long"}}', Retry_After="3")
        async with rig(producer, consumer) as route:
            got = await route.complete(STREAM)
            assert got.status == status
            assert got.error == {"message": "too long"}
            assert got.headers["retry-after"] == "3"
            assert not consumer.calls
            await cancelled_on(got, producer)

    check(test)


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (answers(500, b'{"error": {"message": "out of memory"}}'), "answered 500: .*out of memory"),
        (answers(503), "answered 503"),
        (answers(200, b" "), "an empty answer"),
        (dies, "closed before an answer"),
        (cut_short, "in the middle of the answer"),
    ],
)
def test_a_failed_prefill_names_the_engine_and_the_cause(answer: Handler, cause: str) -> None:
    async def test() -> None:
        producer, consumer = pair()
        producer.answer = answer
        async with rig(producer, consumer) as route:
            got = await route.complete(ASK)
            assert got.status == 502
            assert got.error["code"] == "prefill_failed"
            assert "engine p" in got.error["message"]
            assert re.search(cause, got.error["message"]), got.error
            assert len(producer.calls) == 1
            assert not consumer.calls
            await cancelled_on(got, producer)

    check(test)


def test_a_prefill_engines_own_reason_is_used() -> None:
    async def test() -> None:
        producer, consumer = pair()
        producer.answer = answers(500)
        producer.reason = Reason("deadline_exceeded", "staging stayed full", "staging", "1", "2", "make it larger")
        async with rig(producer, consumer) as route:
            got = await route.complete(ASK)
            assert got.status == 504
            assert got.error["code"] == "deadline_exceeded"
            assert (got.error["field"], got.error["remedy"]) == ("staging", "make it larger")

    check(test)


def test_a_prefill_that_takes_too_long_is_dropped() -> None:
    async def test() -> None:
        producer, consumer = pair()
        producer.delay = 30
        async with rig(producer, consumer, deadline=0.4) as route:
            began = time.monotonic()
            got = await route.complete(ASK)
            assert time.monotonic() - began < 2
            assert (got.status, got.error["code"]) == (502, "prefill_failed")
            assert "0.4 s" in got.error["message"]
            await until(lambda: producer.calls[0].cancelled)
            await cancelled_on(got, producer)
            assert not consumer.calls

    check(test)


# Failures of decode.


@pytest.mark.parametrize("ask", [ASK, STREAM])
@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (answers(500), "answered 500"),
        (answers(200, b"\n"), "an empty answer"),
        (dies, "closed before an answer"),
        (cut_short, "in the middle of the answer"),
        (streams(), "an empty stream"),
        (streams(b": only a comment\n\n"), "an empty stream"),
        (streams(b"data: {", die=True), "in the middle of the answer"),
        (streams(b'data: {"error": {"message": "boom", "code": 500}}\n\n', CHUNKS[-1]), "boom"),
    ],
)
def test_a_failure_before_the_first_byte_is_a_typed_error(ask: dict[str, Any], answer: Handler, cause: str) -> None:
    async def test() -> None:
        producer, consumer = pair()
        consumer.answer = answer
        async with rig(producer, consumer) as route:
            got = await route.complete(ask)
            assert (got.status, got.error["code"]) == (502, "decode_failed")
            assert "engine d" in got.error["message"]
            assert cause in got.error["message"]
            assert len(producer.calls) == len(consumer.calls) == 1
            await cancelled_on(got, producer, consumer)
        # The same without a handoff; only a status is passed on as it is.
        lone = FakeEngine("d", make_contract("both"), answer)
        async with rig(lone) as route:
            got = await route.complete(ask)
            assert got.status in (500, 502)
            assert got.status == 500 or cause in got.error["message"]

    check(test)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("answer", [answers(500), dies, streams(b'data: {"error": {"message": "x", "code": 400}}\n\n')])
def test_the_reason_is_asked_of_decode_then_of_prefill(side: int, answer: Handler) -> None:
    async def test() -> None:
        engines = pair()
        engines[1].answer = answer
        engines[side].reason = LOST
        async with rig(*engines) as route:
            got = await route.complete(STREAM)
            assert (got.status, got.error["code"]) == (502, "peer_gone")
            assert LOST.message in got.error["message"]
            assert got.error["remedy"] == LOST.remedy
            await cancelled_on(got, *engines)

    check(test)


def test_a_first_event_that_blames_the_client_keeps_its_status() -> None:
    async def test() -> None:
        producer, consumer = pair()
        consumer.answer = streams(b'data: {"error": {"message": "bad", "code": 422}}\n\n', CHUNKS[-1])
        async with rig(producer, consumer) as route:
            got = await route.complete(STREAM)
            assert got.status == 422
            assert got.error == {"message": "bad", "code": 422}
            await cancelled_on(got, producer, consumer)

    check(test)


def test_decode_answers_with_a_clients_error() -> None:
    async def test() -> None:
        producer, consumer = pair()
        consumer.answer = answers(429, b"{}", Retry_After="2")
        async with rig(producer, consumer) as route:
            got = await route.complete(ASK)
            assert (got.status, got.data, got.headers["retry-after"]) == (429, b"{}", "2")
            await cancelled_on(got, producer, consumer)

    check(test)


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (streams(CHUNKS[0], b'data: {"half', die=True), "in the middle of the answer"),
        (streams(CHUNKS[0], CHUNKS[1]), "ended early"),
        (streams(CHUNKS[0], b'data: {"half'), "ended early"),
    ],
)
def test_a_stream_that_breaks_ends_with_an_error_event(answer: Handler, cause: str) -> None:
    async def test() -> None:
        producer, consumer = pair()
        consumer.answer = answer
        async with rig(producer, consumer) as route:
            got = await route.complete(STREAM)
            assert got.status == 200
            assert got.data.startswith(CHUNKS[0])
            assert b"half" not in got.data
            assert b"[DONE]" not in got.data
            last = got.data.rstrip().rpartition(b"\n")[2]
            error = json.loads(last.removeprefix(b"data: "))["error"]
            assert error["code"] == "decode_failed"
            assert "engine d" in error["message"]
            assert cause in error["message"]
            await cancelled_on(got, producer, consumer)

    check(test)


def test_the_kv_cache_does_not_arrive_in_time() -> None:
    async def test() -> None:
        producer, consumer = pair()
        consumer.delay, consumer.state = 30, "receiving"
        async with rig(producer, consumer, deadline=0.4) as route:
            got = await route.complete(ASK)
            assert (got.status, got.error["code"]) == (502, "decode_failed")
            assert "0.4 s" in got.error["message"]
            await until(lambda: consumer.calls[0].cancelled)
            await cancelled_on(got, producer, consumer)

    check(test)


def test_decoding_may_take_longer_than_the_deadline_once_the_cache_is_loaded() -> None:
    async def test() -> None:
        producer, consumer = pair()
        consumer.delay, consumer.state = 1.0, "loaded"
        async with rig(producer, consumer, deadline=0.3) as route:
            assert (await route.complete(ASK)).status == 200

    check(test)


# Restarts.


@pytest.mark.parametrize("side", [0, 1])
def test_a_restarted_engine_is_picked_up_within_the_request(side: int) -> None:
    async def test() -> None:
        engines = pair()
        async with rig(*engines, poll=60.0) as route:
            assert (await route.complete(ASK)).status == 200
            engines[side].restart()
            got = await route.complete(ASK)
            assert got.status == 200, got.data
            last = engines[1].calls[-1].ticket
            assert last.handoff == got.headers["x-deeplink-handoff"]
            assert (last.producer, last.consumer) == tuple(engine.contract.epoch for engine in engines)
            await until(lambda: len(engines[0].deleted) == 1)
            assert engines[0].deleted != [last.handoff]

    check(test)


def test_it_is_tried_only_once_more() -> None:
    async def test() -> None:
        producer, consumer = pair()
        consumer.answer, consumer.check_epoch = answers(500), False
        consumer.reason = Reason("ticket_refused", "another incarnation", "epoch", "a", "b")
        async with rig(producer, consumer) as route:
            got = await route.complete(ASK)
            assert (got.status, got.error["code"], got.error["field"]) == (503, "ticket_refused", "epoch")
            assert len(consumer.calls) == 2

    check(test)


@pytest.mark.parametrize("side", [0, 1])
def test_an_engine_whose_api_is_gone_is_gone_around(side: int) -> None:
    """Its control endpoint still answers, so only the call itself shows it."""

    async def test() -> None:
        engines = list(pair())
        spare = FakeEngine("spare", make_contract(("prefill", "decode")[side]))
        async with rig(*engines, spare, poll=60.0) as route:
            await engines[side].stop_api()
            # At once, so that the engine that is gone always looks like the one with less to do.
            spare.delay = 0.3
            for got in await asyncio.gather(*(route.complete(ASK) for _ in range(6))):
                assert got.status == 200, got.data
                assert got.headers[("x-deeplink-prefill", "x-deeplink-decode")[side]] == "spare"

    check(test)


@pytest.mark.parametrize("side", [0, 1])
def test_without_another_engine_the_refused_connection_is_the_error(side: int) -> None:
    async def test() -> None:
        engines = pair()
        async with rig(*engines) as route:
            await engines[side].stop_api()
            got = await route.complete(ASK)
            assert got.status == 502
            assert got.error["code"] == ("prefill_failed", "decode_failed")[side]
            assert f"engine {engines[side].name}: cannot connect" in got.error["message"]

    check(test)


@pytest.mark.parametrize("begun", [False, True])
def test_an_engine_that_shows_no_sign_of_life_is_given_up(begun: bool) -> None:
    async def test() -> None:
        engine = FakeEngine("e", make_contract("both"), streams(*CHUNKS, gap=30 if begun else 0))
        engine.delay = 0 if begun else 30
        async with rig(engine, poll=0.05, patience=0.5) as route:
            task = asyncio.create_task(route.complete(STREAM))
            await until(lambda: engine.calls)
            await asyncio.sleep(0.2)
            await engine.stop_control()
            began = time.monotonic()
            got = await task
            assert time.monotonic() - began < 3
            assert got.status == (200 if begun else 502)
            assert b"no sign of life" in got.data
            assert b"decode_failed" in got.data

    check(test)


# Other engines make good what one has failed at.


def trio(*roles: str) -> list[FakeEngine]:
    return [FakeEngine(f"{role[0]}{number}", make_contract(role)) for number, role in enumerate(roles)]


@pytest.mark.parametrize("answer", [answers(500), answers(200, b" "), dies, cut_short])
def test_a_failed_prefill_is_tried_at_another_engine(answer: Handler) -> None:
    async def test() -> None:
        bad, good, consumer = trio("prefill", "prefill", "decode")
        bad.answer = answer
        async with rig(bad, good, consumer) as route:
            for _ in range(2):
                got = await route.complete(ASK)
                assert got.status == 200, got.data
                assert got.headers["x-deeplink-prefill"] == good.name
            assert len(bad.calls) == 1
            assert len(consumer.calls) == 2
            await until(lambda: len(bad.deleted) == len(bad.calls))

    check(test)


@pytest.mark.parametrize("ask", [ASK, STREAM])
@pytest.mark.parametrize("state", ["staged", "filling", "drained"])
@pytest.mark.parametrize(
    "answer", [answers(500), dies, streams(b'data: {"error": {"message": "boom", "code": 500}}\n\n')]
)
def test_what_is_staged_goes_to_another_decode_engine(ask: dict[str, Any], state: str, answer: Handler) -> None:
    """A claim that was made has used it up; then, and only then, the prompt is prefilled again."""

    async def test() -> None:
        producer, bad, good = trio("prefill", "decode", "decode")
        bad.answer, producer.state = answer, state
        async with rig(producer, bad, good) as route:
            for _ in range(2):
                got = await route.complete(ask)
                assert got.status == 200, got.data
                assert b"boom" not in got.data
                assert got.headers["x-deeplink-decode"] == good.name
            assert len(bad.calls) == 1
            assert len(producer.calls) == (3 if state == "drained" else 2)
            failed = bad.calls[0].ticket
            again = next(call.ticket for call in good.calls if call.ticket.consumer == good.contract.epoch)
            assert again.consumer == good.contract.epoch
            assert (failed.handoff in [call.ticket.handoff for call in good.calls]) == (state != "drained")
            await until(lambda: failed.handoff in bad.deleted)

    check(test)


def test_tries_end() -> None:
    async def test() -> None:
        producer, *consumers = trio("prefill", "decode", "decode", "decode", "decode")
        for consumer in consumers:
            consumer.answer = answers(500)
        producer.state = "staged"
        async with rig(producer, *consumers, retries=2) as route:
            got = await route.complete(ASK)
            assert (got.status, got.error["code"]) == (502, "decode_failed")
            assert sum(len(consumer.calls) for consumer in consumers) == 3
            assert len(producer.calls) == 1
            await cancelled_on(got, producer, *(consumer for consumer in consumers if consumer.calls))
        async with rig(producer, *consumers, retries=0) as route:
            before = sum(len(consumer.calls) for consumer in consumers)
            assert (await route.complete(ASK)).status == 502
            assert sum(len(consumer.calls) for consumer in consumers) == before + 1

    check(test)


@pytest.mark.parametrize("status", [502, 503, 504])
def test_an_engine_that_is_unavailable_is_gone_around(status: int) -> None:
    async def test() -> None:
        bad, good = trio("both", "both")
        bad.answer = answers(status, b'{"error": {"message": "no"}}', Retry_After="7")
        async with rig(bad, good) as route:
            assert {(await route.complete(ASK)).status for _ in range(4)} == {200}
            await good.stop()
            got = await route.complete(ASK)
            assert (got.status, got.data, got.headers["retry-after"]) == (status, b'{"error": {"message": "no"}}', "7")

    check(test)


def test_nothing_is_tried_again_once_a_byte_is_out() -> None:
    async def test() -> None:
        bad, good = trio("both", "both")
        bad.answer = good.answer = streams(CHUNKS[0], die=True)
        async with rig(bad, good) as route:
            got = await route.complete(STREAM)
            assert got.status == 200
            assert b"decode_failed" in got.data
            assert len(bad.calls) + len(good.calls) == 1

    check(test)


def test_a_full_fleet_says_when_to_come_back() -> None:
    async def test() -> None:
        engine = FakeEngine("e", make_contract("both"), delay=0.3)
        async with rig(engine, max_requests=1, queue=1) as route:
            tasks = [asyncio.create_task(route.complete(ASK)) for _ in range(2)]
            await until(lambda: engine.calls)
            await asyncio.sleep(0.05)
            got = await route.complete(ASK)
            assert (got.status, got.error["code"], got.headers["Retry-After"]) == (429, "overloaded", "1")
            assert [(await task).status for task in tasks] == [200, 200]
        async with rig(engine, max_requests=1, queue=0) as route:
            task = asyncio.create_task(route.complete(ASK))
            await asyncio.sleep(0.1)
            assert (await route.complete(ASK)).status == 429
            assert (await task).status == 200

    check(test)


def test_bad_requests_of_clients_do_not_count_against_an_engine() -> None:
    async def test() -> None:
        producer, consumer = pair()
        blames = streams(b'data: {"error": {"message": "bad", "code": 422}}\n\n')
        async with rig(producer, consumer, breaker_failures=2) as route:
            for producing, consuming in ((answers(400), None), (None, answers(400)), (None, blames)):
                producer.answer, consumer.answer = producing, consuming
                for _ in range(3):
                    assert (await route.complete(STREAM)).status in (400, 422)
            assert b'takes_requests{engine="p"} 1.0' in (await route.get("/metrics")).data
            assert b'takes_requests{engine="d"} 1.0' in (await route.get("/metrics")).data
            producer.answer, consumer.answer = answers(500), None
            for _ in range(3):
                assert (await route.complete(ASK)).status == 502
            assert b'takes_requests{engine="p"} 0.0' in (await route.get("/metrics")).data
            producer.answer = None
            assert (await route.complete(ASK)).status == 200, "better than none"
            assert b'takes_requests{engine="p"} 1.0' in (await route.get("/metrics")).data

    check(test)


def test_a_short_prompt_is_not_handed_over() -> None:
    async def test() -> None:
        producer, consumer = pair()
        async with rig(producer, consumer, min_prefill=10) as route:
            short, long = {"prompt": "x" * 36}, {"prompt": "x" * 40}
            assert (await route.complete(short)).headers["x-deeplink-path"] == "plain"
            assert (await route.complete(long)).headers["x-deeplink-path"] == "handoff"
            assert (await route.complete({"prompt": [1] * 9})).headers["x-deeplink-path"] == "plain"
            assert (await route.complete({"prompt": [1] * 10})).headers["x-deeplink-path"] == "handoff"

    check(test)


# Both engines at once.


def together(*engines: FakeEngine, **section: Any) -> Any:
    return rig(*engines, dispatch="together", **section)


def test_together_both_are_asked_with_one_ticket_before_prefill_is_done() -> None:
    async def test() -> None:
        producer, consumer = pair()
        producer.delay, consumer.delay = 0.3, 0.4
        async with together(producer, consumer) as route:
            task = asyncio.create_task(route.complete(ASK))
            await until(lambda: producer.calls and consumer.calls, 0.25)
            assert producer.calls[0].part["ticket"] == consumer.calls[0].part["ticket"]
            got = await task
            assert (got.status, got.headers["x-deeplink-path"]) == (200, "handoff")
            assert not producer.deleted
            assert not consumer.deleted

    check(test)


def apart() -> tuple[FakeEngine, FakeEngine]:
    """On hosts of their own, by where their caches are."""
    producer, consumer = pair()
    producer.contract, consumer.contract = make_contract("prefill", channel="10.0.0.1:41"), make_contract("decode")
    consumer.early, producer.stages = True, asyncio.Queue()
    return producer, consumer


@pytest.mark.parametrize(("stage", "early"), [(BEGUN, True), (COMPLETE, False)])
def test_with_auto_decode_is_asked_once_there_is_something_to_fetch(stage: int, early: bool) -> None:
    """Before that it would have a request that it can only look at again and again."""

    async def test() -> None:
        producer, consumer = apart()
        producer.delay = 5
        async with rig(producer, consumer, dispatch="auto") as route:
            task = asyncio.create_task(route.complete(ASK))
            await until(lambda: producer.calls and producer.watched)
            producer.stages.put_nowait(NOT_BEGUN)
            await until(lambda: len(producer.watched) == 2)
            assert not consumer.calls
            producer.stages.put_nowait(stage)
            got = await task
            assert (got.status, got.headers["x-deeplink-path"]) == (200, "handoff")
            assert set(producer.watched) == {producer.calls[0].ticket.handoff}
            assert consumer.calls[0].part.get("early", False) is early
            assert "early" not in producer.calls[0].part

    check(test)


@pytest.mark.parametrize("knows", ["decode does not", "prefill does not", "prefill is first", "one host"])
def test_with_auto_decode_is_asked_when_prefill_is_done_where_nobody_says_that_it_has_begun(knows: str) -> None:
    """Nor is it asked earlier where there is no link whose time could be hidden."""

    async def test() -> None:
        producer, consumer = apart()
        producer.delay, consumer.early = 0.1, knows != "decode does not"
        if knows == "prefill does not":
            producer.stages = None
        if knows == "one host":
            producer.contract = make_contract("prefill")
        async with rig(producer, consumer, dispatch="auto") as route:
            got = await route.complete(ASK)
            assert (got.status, got.headers["x-deeplink-path"]) == (200, "handoff")
            assert bool(producer.watched) is (knows == "prefill is first")
            assert consumer.calls[0].part.get("early", False) is False
            assert not producer.calls[0].cancelled

    check(test)


@pytest.mark.parametrize(("status", "seen"), [(400, 400), (500, 502)])
def test_with_auto_a_prefill_that_fails_is_not_waited_for(status: int, seen: int) -> None:
    async def test() -> None:
        producer, consumer = apart()
        producer.answer = answers(status)
        async with rig(producer, consumer, dispatch="auto", retries=0) as route:
            assert (await route.complete(ASK)).status == seen
            assert not consumer.calls

    check(test)


def test_with_auto_a_client_that_leaves_before_prefill_has_begun() -> None:
    async def test() -> None:
        producer, consumer = apart()
        producer.delay = 5
        async with rig(producer, consumer, dispatch="auto") as route:
            task = asyncio.create_task(route.complete(ASK))
            await until(lambda: producer.calls and producer.watched)
            task.cancel()
            await until(lambda: producer.calls[0].cancelled and producer.deleted)
            assert not consumer.calls

    check(test)


def of_rank(contract: Contract, dp: int) -> Contract:
    ranks = tuple(msgspec.structs.replace(rank, dp=dp) for rank in contract.ranks)
    return msgspec.structs.replace(contract, ranks=ranks)


def test_data_parallel_ranks_are_addressed_on_either_side() -> None:
    async def test() -> None:
        producer, consumer = pair()
        producer.declared["rank"], consumer.declared["rank"] = 1, 0
        producer.contract = of_rank(producer.contract, 1)
        async with rig(producer, consumer) as route:
            got = await route.complete(ASK, headers={"X-Data-Parallel-Rank": "9"})
            assert (got.status, got.headers["x-deeplink-path"]) == (200, "handoff")
            for engine, rank in ((producer, "1"), (consumer, "0")):
                assert engine.calls[0].headers.getall("x-data-parallel-rank") == [rank]

    check(test)


@pytest.mark.parametrize(("said", "stated"), [(None, 1), (1, 0), (2, 1)])
def test_the_contract_of_another_rank_than_requests_would_name_is_refused(said: int | None, stated: int) -> None:
    async def test() -> None:
        producer, consumer = pair()
        producer.declared["rank"], producer.contract = said, of_rank(producer.contract, stated)
        async with rig(producer, consumer) as route:
            got = await route.complete(ASK)
            assert got.status == 503
            assert f"set rank = {stated} for this engine" in got.data.decode()
            assert not producer.calls

    check(test)


def test_sequential_is_sequential_whatever_engines_say() -> None:
    async def test() -> None:
        producer, consumer = pair()
        consumer.early = True
        async with rig(producer, consumer, dispatch="sequential") as route:
            assert (await route.complete(ASK)).status == 200
            assert "early" not in consumer.calls[0].body["kv_transfer_params"]["deeplink"]

    check(test)


def test_together_decode_may_answer_before_prefill_does() -> None:
    async def test() -> None:
        producer, consumer = pair()
        producer.delay = 5
        async with together(producer, consumer) as route:
            got = await route.complete(STREAM)
            assert got.data == b"".join(CHUNKS)
            await until(lambda: producer.calls[0].cancelled)
            await cancelled_on(got, producer)

    check(test)


@pytest.mark.parametrize(("status", "seen"), [(400, 400), (500, 502)])
def test_together_a_failed_prefill_ends_decode_at_once(status: int, seen: int) -> None:
    async def test() -> None:
        producer, consumer = pair()
        producer.answer, consumer.delay = answers(status), 5
        async with together(producer, consumer) as route:
            got = await route.complete(ASK)
            assert got.status == seen
            await until(lambda: consumer.calls[0].cancelled, 1.0)
            await cancelled_on(got, producer, consumer)

    check(test)


def test_together_a_failed_decode_ends_prefill_at_once() -> None:
    async def test() -> None:
        producer, consumer = pair()
        producer.delay, consumer.answer = 5, answers(500)
        async with together(producer, consumer) as route:
            got = await route.complete(ASK)
            assert (got.status, got.error["code"]) == (502, "decode_failed")
            await until(lambda: producer.calls[0].cancelled, 1.0)
            await cancelled_on(got, producer, consumer)

    check(test)


def test_together_a_failed_decode_is_replaced_while_prefill_runs() -> None:
    async def test() -> None:
        producer, bad, good = trio("prefill", "decode", "decode")
        producer.delay, producer.state, bad.answer = 0.3, "filling", answers(500)
        good.delay = 0.4
        async with together(producer, bad, good) as route:
            for _ in range(2):
                got = await route.complete(ASK)
                assert (got.status, got.headers["x-deeplink-decode"]) == (200, good.name)
            assert len(producer.calls) == 2
            assert len(bad.calls) == 1

    check(test)
