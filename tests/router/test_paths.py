"""Other paths than completions pass to an engine that serves them."""

from __future__ import annotations

import pytest
from aiohttp import web

from deeplink.config import PATHS
from deeplink.router.paths import passes

from .fake_engine import FakeEngine, make_contract, stream
from .rig import check, pair, rig


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/v1/responses/abc/cancel", "/tokenize", "/v2/rerank", "/v1/audio/transcriptions"]
)
def test_clients_paths_pass(path: str) -> None:
    assert passes(path, PATHS)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/shutdown",
        "/metrics",
        "/sleep",
        "/v1/load_lora_adapter",
        "/v1/load_lora_adapter/",
        "/v1/../shutdown",
        "/v1//load_lora_adapter",
        "/v1/./load_lora_adapter",
        "/v1/x/..",
        "/v1/%2e%2e/shutdown",
        "/v1/\\..\\shutdown",
        "//v1/x",
        "/v1/x\nstatus=200",
        "/tokenizer",
    ],
)
def test_operators_paths_and_riddles_do_not(path: str) -> None:
    assert not passes(path, PATHS)


def serving(name: str, role: str, **paths: object) -> FakeEngine:
    engine = FakeEngine(name, make_contract(role))
    engine.others = {f"/{path.replace('_', '/')}": answer for path, answer in paths.items()}
    return engine


def test_another_path_goes_to_an_engine_that_serves_it() -> None:
    async def test() -> None:
        one, other = serving("one", "both"), serving("other", "both", v1_embeddings={"data": [1]})
        async with rig(one, other) as route:
            raw = b'{"input": "x", "kv_transfer_params": {"a": 1}, "unknown": 1}'
            for _ in range(4):
                got = await route.complete(data=raw, path="/v1/embeddings?x=1")
                assert (got.status, got.data) == (200, b'{"data": [1]}')
                assert got.headers["x-deeplink-decode"] == "other"
            assert other.calls[-1].body == {"input": "x", "unknown": 1}
            assert other.calls[-1].query == "x=1"
            got = await route.complete({}, "/v1/nothing")
            assert (got.status, got.data) == (404, b"404: Not Found")
            got = await route.complete({}, "/shutdown")
            assert (got.status, got.error["code"]) == (404, "not_found")

    check(test)


def test_it_is_never_handed_over() -> None:
    async def test() -> None:
        producer, consumer = pair()
        consumer.others = {"/tokenize": {"tokens": [1]}}
        async with rig(producer, consumer) as route:
            got = await route.complete({"prompt": "x"}, "/tokenize")
            assert (got.status, got.headers["x-deeplink-path"]) == (200, "plain")
            assert not producer.calls

    check(test)


def test_methods_empty_bodies_and_forms_pass() -> None:
    async def test() -> None:
        engine = serving("e", "both", v1_responses_r1={"id": "r1"}, v1_audio_transcriptions={"text": "x"})
        async with rig(engine) as route:
            got = await route.get("/v1/responses/r1")
            assert (got.status, got.data) == (200, b'{"id": "r1"}')
            assert (engine.calls[-1].raw, engine.calls[-1].method) == (b"", "GET")
            headers = {"Content-Type": "multipart/form-data; boundary=b"}
            form = b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n\x00\xff\r\n--b--\r\n'
            got = await route.complete(data=form, path="/v1/audio/transcriptions", headers=headers)
            assert got.status == 200
            assert engine.calls[-1].raw == form
            got = await route.complete(data=b"no json", path="/v1/audio/transcriptions")
            assert got.status == 400
            async with route.client.request("PATCH", route.url + "/v1/responses/r1") as response:
                assert (response.status, response.headers["Allow"]) == (405, "DELETE,GET,POST")

    check(test)


def test_a_stream_without_a_mark_at_its_end_is_whole() -> None:
    async def test() -> None:
        chunks = [b"event: message_start\ndata: {}\n\n", b"event: message_stop\ndata: {}\n\n"]

        async def answer(request: web.Request) -> web.StreamResponse:
            return await stream(request, chunks)

        async def breaks(request: web.Request) -> web.StreamResponse:
            return await stream(request, chunks[:1], die=True)

        engine = serving("e", "both", v1_messages=answer)
        async with rig(engine) as route:
            got = await route.complete({"stream": True}, "/v1/messages")
            assert got.data == b"".join(chunks)
            engine.others = {"/v1/messages": breaks}
            got = await route.complete({"stream": True}, "/v1/messages")
            assert got.data.startswith(chunks[0])
            assert b"decode_failed" in got.data

    check(test)
