"""The HTTP endpoint."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import logging
from typing import Any

import openai
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from deeplink.router.parts import ADMISSION, RECENT

from .fake_engine import CHUNKS, FakeEngine, answers, make_contract, streams
from .rig import Rig, check, pair, rig, router, running
from .test_body import objects, styles

ASK = {"prompt": "x"}


def test_unknown_paths_and_methods() -> None:
    async def test() -> None:
        async with rig(*pair()) as route:
            got = await route.complete({}, "/nothing")
            assert (got.status, got.error["code"]) == (404, "not_found")
            assert got.error["type"] == "invalid_request_error"
            got = await route.get("/v1/completions")
            assert (got.status, got.error["code"]) == (405, "method_not_allowed")
            assert got.headers["Allow"] == "POST"

    check(test)


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[1]", b'"x"', b'{"a":' + b"[" * 50_000, b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}"],
)
def test_bad_json(raw: bytes) -> None:
    async def test() -> None:
        producer, consumer = pair()
        async with rig(producer, consumer) as route:
            got = await route.complete(data=raw)
            assert (got.status, got.error["code"]) == (400, "invalid_request")
            assert not producer.calls

    check(test)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit(chunked: bool) -> None:
    async def test() -> None:
        engine = FakeEngine("e", make_contract("both"))
        async with rig(engine, max_body=1000) as route:
            fits = b'{"prompt":"' + b"x" * 987 + b'"}'
            assert len(fits) == 1000

            async def parts(data: bytes) -> Any:
                yield data[:500]
                yield data[500:]

            for data, status in ((fits, 200), (fits + b" ", 413)):
                got = await route.complete(data=parts(data) if chunked else data)
                assert got.status == status, got.data
            assert got.error["code"] == "request_too_large"
            assert "1000" in got.error["message"]
            assert len(engine.calls) == 1

    check(test)


def test_bodies_larger_than_the_servers_default_pass() -> None:
    async def test() -> None:
        producer, consumer = pair()
        async with rig(producer, consumer) as route:
            large = io.BytesIO(json.dumps({"prompt": "x" * (4 << 20)}).encode())
            assert (await route.complete(data=large)).status == 200
            assert len(consumer.calls[0].body["prompt"]) == 4 << 20

    check(test)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(objects, styles), min_size=1, max_size=8))
def test_whatever_the_client_sends_reaches_the_engines(
    asks: list[tuple[dict[str, Any], dict[str, Any]]],
) -> None:
    async def test() -> None:
        producer, consumer = pair()
        async with rig(producer, consumer) as route:
            for fields, style in asks:
                raw = json.dumps(fields, **style).encode(errors="surrogatepass")
                got = await route.complete(data=raw)
                assert got.status == 200
                decoded = consumer.calls[-1].raw
                if got.headers["x-deeplink-path"] == "plain":
                    # It made up an `n` or the like.
                    assert decoded == raw
                    continue
                own = json.loads(decoded)
                assert own.pop("kv_transfer_params")["deeplink"]["side"] == "consume"
                assert own == fields
                assert decoded.endswith(raw[1:])

    check(test)


def test_headers() -> None:
    async def test() -> None:
        producer, consumer = pair()
        async with rig(producer, consumer) as route:
            sent = {
                "Authorization": "Bearer k",
                "X-Deeplink-Path": "plain",
                "X-Mine": "1",
                "X-Request-Id": "abc",
            }
            got = await route.complete(ASK, headers=sent)
            for call in (producer.calls[0], consumer.calls[0]):
                assert call.headers["Authorization"] == "Bearer k"
                assert call.headers["X-Mine"] == "1"
                assert call.headers["X-Request-Id"] == "abc"
                assert call.headers["Content-Type"] == "application/json"
                assert not [name for name in call.headers if name.lower().startswith("x-deeplink")]
                assert call.headers["Accept-Encoding"] == "identity"
            assert got.headers["x-deeplink-path"] == "handoff"

    check(test)


def test_the_query_reaches_the_engines() -> None:
    async def test() -> None:
        producer, consumer = pair()
        async with rig(producer, consumer) as route:
            got = await route.complete(ASK, "/v1/completions?a=b%20c&d")
            assert got.status == 200
            assert producer.calls[0].query == consumer.calls[0].query == "a=b c&d"

    check(test)


def test_a_body_that_is_not_what_its_headers_say() -> None:
    async def test() -> None:
        producer, consumer = pair()
        async with rig(producer, consumer) as route:
            headers = {"Content-Encoding": "gzip"}
            got = await route.complete(data=gzip.compress(b'{"prompt":"x"}'), headers=headers)
            assert got.status == 200
            assert consumer.calls[0].body["prompt"] == "x"
            assert "Content-Encoding" not in consumer.calls[0].headers
            got = await route.complete(data=b'{"prompt":"x"}', headers=headers)
            assert got.status == 400
            assert len(consumer.calls) == 1

    check(test)


def test_a_compressed_body_counts_by_what_it_holds() -> None:
    async def test() -> None:
        engine = FakeEngine("e", make_contract("both"))
        async with rig(engine, max_body=1 << 20) as route:
            data = gzip.compress(b'{"prompt":"' + b"x" * (64 << 20) + b'"}')
            assert len(data) < 1 << 20
            got = await route.complete(data=data, headers={"Content-Encoding": "gzip"})
            assert (got.status, got.error["code"]) == (413, "request_too_large")

    check(test)


def test_a_far_too_large_body_is_answered() -> None:
    async def test() -> None:
        engine = FakeEngine("e", make_contract("both"))
        async with rig(engine, max_body=1 << 20) as route:

            async def parts() -> Any:
                for _ in range(40):
                    yield b" " * (1 << 20)

            for data in (io.BytesIO(b" " * (40 << 20)), parts()):
                got = await route.complete(data=data)
                assert (got.status, got.error["code"]) == (413, "request_too_large")

    check(test)


def test_models_come_from_an_engine_that_is_up() -> None:
    async def test() -> None:
        producer, consumer = pair()
        async with running(producer, consumer), router(producer, consumer) as route:
            got = await route.get("/v1/models")
            assert json.loads(got.data)["data"][0]["id"] == "model of d"
            await consumer.stop()
            await asyncio.sleep(0.3)
            got = await route.get("/v1/models")
            assert json.loads(got.data)["data"][0]["id"] == "model of p"
            await producer.stop()
            await asyncio.sleep(0.3)
            got = await route.get("/v1/models")
            assert (got.status, got.error["code"]) == (503, "no_engine")

    check(test)


def test_health_is_200_only_if_something_can_serve() -> None:
    async def test() -> None:
        producer, consumer = pair()
        async with running(producer, consumer), router(producer, consumer) as route:
            got = await route.get("/health")
            assert (got.status, json.loads(got.data)["ok"]) == (200, True)
            await producer.stop()
            await asyncio.sleep(0.3)
            got = await route.get("/health")
            assert got.status == 503
            assert json.loads(got.data)["engines"] == {
                "p": {"up": False, "role": "prefill"},
                "d": {"up": True, "role": "decode"},
            }
        async with rig(*pair(dtype="float16")) as route:
            assert (await route.get("/health")).status == 503
        async with rig() as route:
            assert (await route.get("/health")).status == 503

    check(test)


def test_more_streams_than_any_pool() -> None:
    """150 at once, all of them at the engine."""

    async def test() -> None:
        together = asyncio.Event()
        engine = FakeEngine("e", make_contract("both"))

        async def answer(request: web.Request) -> web.StreamResponse:
            if len(engine.calls) == 150:
                together.set()
            await asyncio.wait_for(together.wait(), 5)
            return await streams(*CHUNKS)(request)

        engine.answer = answer
        async with rig(engine) as route:
            got = await asyncio.gather(*(route.complete(ASK | {"stream": True}) for _ in range(150)))
            assert {(one.status, one.data) for one in got} == {(200, b"".join(CHUNKS))}

    check(test)


def test_the_log_has_one_line_per_request_and_no_prompt(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        producer, consumer = pair()
        async with rig(producer, consumer) as route:
            caplog.clear()
            headers = {"Authorization": "Bearer hush"}
            await route.complete({"prompt": "my prompt"}, headers=headers)
            consumer.answer = answers(500, b'{"error": {"message": "cannot serve: my prompt"}}')
            await route.complete({"prompt": "my prompt"}, headers=headers)
            await route.complete(data=b'{"prompt": "my prompt"')

    with caplog.at_level(logging.INFO, logger="deeplink"):
        check(test)
    lines = [record.getMessage() for record in caplog.records if record.name == "deeplink.router.app"]
    assert len(lines) == 3
    assert "status=200" in lines[0]
    assert "prefill=p decode=d" in lines[0]
    assert "code=decode_failed" in lines[1]
    assert "status=400" in lines[2]
    assert "my prompt" not in caplog.text
    assert "hush" not in caplog.text


def test_no_log_of_any_level_has_what_was_asked_or_answered(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever happens, and whoever logs it."""

    async def test() -> None:
        producer, *consumers = pair()[0], *(FakeEngine(name, make_contract("decode")) for name in ("d", "e"))
        quoting = b'{"error": {"message": "cannot serve: my prompt"}}'
        streamed = b'data: {"error": {"message": "my prompt"}}\n\n'
        producer.others = consumers[0].others = {"/tokenize": {"prompt": "my prompt"}}
        policies = {"prefill_policy": "prefix", "decode_policy": "session"}
        async with rig(producer, *consumers, **policies) as route:
            for answer in (
                None,
                answers(500, quoting),
                answers(503, quoting),
                answers(400, quoting),
                streams(streamed),
            ):
                for engine in (producer, *consumers):
                    engine.answer = answer
                    for more in ({}, {"stream": True}, {"n": 2}, {"user": "my prompt"}):
                        await route.complete({"prompt": "my prompt"} | more, headers={"X-Session-Id": "my prompt"})
            await route.complete({"prompt": "my prompt"}, "/tokenize?x=my%20prompt")
            await route.complete(data=b"my prompt")
            await route.complete(data=b"my prompt", path="/v1/embeddings")
            metrics = (await route.get("/metrics")).data
            assert b"my" not in metrics.replace(b"my_", b"")

    with caplog.at_level(logging.DEBUG):
        check(test)
    assert "my prompt" not in caplog.text
    assert "my%20prompt" not in caplog.text


def sdk(route: Rig) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{route.url}/v1", api_key="k", max_retries=0)


def test_openai_sdk_completes_and_streams() -> None:
    async def test() -> None:
        producer, consumer = pair()
        async with rig(producer, consumer) as route, sdk(route) as client:
            made = await client.completions.create(model="m", prompt="x", extra_body={"unknown": 1})
            assert made.choices[0].text == "hello"
            assert consumer.calls[0].body["unknown"] == 1
            stream = await client.completions.create(model="m", prompt="x", stream=True)
            texts = [event.choices[0].text async for event in stream if event.choices]
            assert texts == ["café"]
            listed = await client.models.list()
            assert listed.data[0].id == "model of d"

    check(test)


def test_openai_sdk_sees_typed_errors() -> None:
    async def test() -> None:
        producer, consumer = pair()
        async with rig(producer, consumer) as route, sdk(route) as client:
            consumer.answer = streams(CHUNKS[0], die=True)
            stream = await client.completions.create(model="m", prompt="x", stream=True)
            assert (await anext(stream)).choices[0].text == "café"
            with pytest.raises(openai.APIError, match="engine d did not finish") as caught:
                await anext(stream)
            assert caught.value.code == "decode_failed"
            producer.answer = answers(500)
            with pytest.raises(openai.InternalServerError) as failed:
                await client.completions.create(model="m", prompt="x")
            assert (failed.value.status_code, failed.value.code) == (502, "prefill_failed")

    check(test)


def test_openai_sdk_without_async_and_what_it_can_ask_for() -> None:
    tools: Any = [
        {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object"}}},
    ]
    schema: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}, "strict": True}}
    vector = {"object": "list", "data": [{"object": "embedding", "index": 0, "embedding": [0.5]}], "model": "m"}

    def ask(url: str) -> None:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
            client.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": "x"}],
                tools=tools,
                tool_choice="auto",
                parallel_tool_calls=False,
                response_format=schema,
                extra_body={"chat_template_kwargs": {"thinking": False}, "min_p": 0.1},
            )
            events = list(client.completions.create(model="m", prompt="x", stream=True))
            assert events[0].choices[0].text == "café"
            made = client.embeddings.create(model="m", input="x")
            assert made.data[0].embedding == [0.5]
            assert client.responses.create(model="m", input="x").id == "r1"

    async def test() -> None:
        producer, consumer = pair()
        consumer.others = {"/v1/embeddings": vector, "/v1/responses": {"id": "r1", "object": "response", "output": []}}
        async with rig(producer, consumer) as route:
            await asyncio.to_thread(ask, route.url)
            for engine in (producer, consumer):
                body = engine.calls[0].body
                assert body["tools"] == tools
                assert body["response_format"] == schema
                assert body["parallel_tool_calls"] is False
                assert body["chat_template_kwargs"] == {"thinking": False}
                assert body["min_p"] == 0.1
            assert [call.path for call in producer.calls] == ["/v1/chat/completions", "/v1/completions"]

    check(test)


def test_a_request_that_cannot_even_be_measured_leaves_nothing_behind() -> None:
    async def test() -> None:
        engine = FakeEngine("e", make_contract("both"))
        async with rig(engine) as route:
            deep = b'{"prompt":"x","tools":' + b"[" * 900 + b"]" * 900 + b"}"
            for raw in (deep, deep.replace(b'"x"', b'"x","stream":true')):
                got = await route.complete(data=raw)
                assert got.status in (200, 400), got.data
            assert not route.app[RECENT].live
            assert route.app[ADMISSION].load.idle

    check(test)
