"""What happens below HTTP, and at its edges: limits, TLS, and requests that two parsers might read differently."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from pathlib import Path

import aiohttp
import pytest

from deeplink.config import RouterTlsSection
from deeplink.errors import ConfigError
from deeplink.router.serve import MAX_HEAD, load_tls

from .certificates import make_certificate
from .fake_engine import FakeEngine, make_contract, running
from .rig import Rig, check, rig, router, until

BODY = b'{"prompt":"x"}'


def lone() -> FakeEngine:
    return FakeEngine("e", make_contract("both"))


async def raw(route: Rig, *parts: bytes, gap: float = 0.0, seconds: float = 3.0) -> bytes:
    """All that comes back for these bytes until the router closes or is silent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(route.url.rpartition(":")[2]))
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(gap)
        data = b""
        while chunk := await asyncio.wait_for(reader.read(65536), seconds):
            data += chunk
        return data
    except asyncio.TimeoutError:
        return data
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def head(*lines: bytes) -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\nHost: h\r\n" + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


SMUGGLED = b"POST /shutdown HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        head(b"Content-Length: 14", b"Transfer-Encoding: chunked") + b"0\r\n\r\n" + SMUGGLED,
        head(b"Transfer-Encoding: chunked", b"Content-Length: 0") + b"e\r\n" + BODY + b"\r\n0\r\n\r\n",
        head(b"Content-Length: 14", b"Content-Length: 0") + BODY,
        head(b"Content-Length: 14, 14") + BODY,
        head(b"Content-Length: +14") + BODY,
        head(b"Content-Length: 0x0e") + BODY,
        head(b"Content-Length: -1") + BODY,
        head(b"Content-Length : 14") + BODY,
        head(b"Transfer-Encoding: xchunked") + b"0\r\n\r\n",
        head(b"Transfer-Encoding: chunked, identity") + b"0\r\n\r\n",
        head(b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity") + b"0\r\n\r\n",
        head(b"Transfer-Encoding: \x0bchunked") + b"0\r\n\r\n",
        head(b"Transfer-Encoding: chunked") + b"0xe\r\n" + BODY + b"\r\n0\r\n\r\n",
        head(b"Transfer-Encoding: chunked") + b"-e\r\n" + BODY + b"\r\n0\r\n\r\n",
        head(b"X: a", b" folded", b"Content-Length: 14") + BODY,
        head(b"X: a\rContent-Length: 0", b"Content-Length: 14") + BODY,
        head(b"X\x00: a", b"Content-Length: 14") + BODY,
        b"POST /v1/completions HTTP/1.1\nHost: h\nContent-Length: 14\n\n" + BODY,
        b"POST /v1/completions HTTP/9.9\r\nHost: h\r\nContent-Length: 14\r\n\r\n" + BODY,
        b"GET /v1/models HTTP/1.1 x\r\nHost: h\r\n\r\n",
    ],
)
def test_what_could_be_read_in_two_ways_reaches_no_engine(sent: bytes) -> None:
    async def test() -> None:
        engine = lone()
        async with rig(engine) as route:
            answer = await raw(route, sent, seconds=0.5)
            assert b" 200 " not in answer.split(b"\r\n")[0]
            assert not engine.calls

    check(test)


def test_what_cannot_be_read_is_not_quoted_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """A length that is too short makes the rest of a prompt look like a request."""

    async def test() -> None:
        engine = lone()
        async with rig(engine) as route:
            whole = b'{"prompt": "x"}my prompt\r\n\r\n'
            await raw(route, head(b"Content-Length: 15") + whole, seconds=0.3)
            await raw(route, head(b"Transfer-Encoding: chunked") + b"my prompt\r\n", seconds=0.3)
            await raw(route, b"my prompt\r\n\r\n", seconds=0.3)
            await raw(route, head(b"my prompt"), seconds=0.3)

    with caplog.at_level(logging.DEBUG):
        check(test)
    assert "my prompt" not in caplog.text
    assert "not HTTP" in caplog.text


def test_a_pipelined_request_is_a_request_of_its_own() -> None:
    async def test() -> None:
        engine = lone()
        async with rig(engine) as route:
            answer = await raw(route, head(b"Content-Length: 14") + BODY + SMUGGLED, seconds=0.5)
            assert answer.count(b"HTTP/1.1 200") == 1
            assert answer.count(b"HTTP/1.1 404") == 1
            assert [call.path for call in engine.calls] == ["/v1/completions"]

    check(test)


def test_an_engine_gets_a_length_whatever_the_client_sent() -> None:
    async def test() -> None:
        engine = lone()
        async with rig(engine) as route:
            chunked = head(b"Transfer-Encoding: chunked", b"Connection: close") + b"e\r\n" + BODY + b"\r\n0\r\n\r\n"
            assert b" 200 " in await raw(route, chunked)
            assert engine.calls[0].raw == BODY
            assert "Transfer-Encoding" not in engine.calls[0].headers or "Content-Length" not in engine.calls[0].headers

    check(test)


@pytest.mark.parametrize(
    "target",
    [
        b"/shutdown",
        b"/v1/../shutdown",
        b"/v1/%2e%2e/shutdown",
        b"/v1/x/..%2f..%2fshutdown",
        b"/v1%2fload_lora_adapter",
        b"/%76%31/load_lora_adapter",
        b"/v1//load_lora_adapter",
        b"//shutdown",
        b"/v1/%0d%0ax",
        b"/v1/x#/../../shutdown",
        b"http://other/shutdown",
        b"*",
    ],
)
def test_no_way_of_writing_a_path_leads_to_one_that_does_not_pass(target: bytes) -> None:
    class Everything(dict[str, object]):
        def __contains__(self, path: object) -> bool:
            return True

        def __getitem__(self, path: str) -> object:
            return {}

    async def test() -> None:
        engine = lone()
        engine.others = Everything()
        async with rig(engine) as route:
            sent = b"POST " + target + b" HTTP/1.1\r\nHost: h\r\nContent-Length: 14\r\n\r\n" + BODY
            await raw(route, sent, seconds=0.3)
            assert [call.path for call in engine.calls if call.path != "/v1/x"] == []
            await raw(route, sent.replace(target, b"/v1/embeddings"), seconds=0.3)
            assert engine.calls[-1].path == "/v1/embeddings"

    check(test)


def test_requests_that_run_end_before_the_router_does() -> None:
    async def test() -> None:
        engine = lone()
        engine.delay = 0.4
        async with running(engine), aiohttp.ClientSession() as client:

            async def ask(url: str) -> int:
                async with client.post(url + "/v1/completions", json={"prompt": "x"}) as response:
                    await response.read()
                    return response.status

            async with router(engine) as route:
                task = asyncio.create_task(ask(route.url))
                await until(lambda: engine.calls)
            assert await task == 200

    check(test)


def test_a_head_that_does_not_come_ends_the_connection() -> None:
    async def test() -> None:
        async with rig(lone(), header_seconds=0.3) as route:
            for parts in ([b""], [b"POST /v1/comp"], [b"X"] * 3):
                began = time.monotonic()
                assert b" 200 " not in await raw(route, *parts, gap=0.05)
                assert time.monotonic() - began < 1.5
            slow = head(b"Content-Length: 14", b"Connection: close")
            answer = await raw(route, slow, BODY[:5], BODY[5:], gap=0.3)
            assert b" 200 " in answer, "the time is for the head alone"
            parts = [slow[:-3], slow[-3:-2], slow[-2:] + BODY]
            assert b" 200 " in await raw(route, *parts, gap=0.02)

    check(test)


def test_a_head_that_is_too_large() -> None:
    async def test() -> None:
        engine = lone()
        async with rig(engine) as route:
            for lines in ([b"X: " + b"x" * 9000], [b"X%d: " % n + b"x" * 4000 for n in range(MAX_HEAD // 4000 + 1)]):
                assert b" 200 " not in await raw(route, head(*lines, b"Content-Length: 14") + BODY, seconds=1.0)
            assert not engine.calls

    check(test)


def test_connections_beyond_the_limit_are_closed() -> None:
    async def test() -> None:
        async with rig(lone(), max_connections=2) as route:
            port = int(route.url.rpartition(":")[2])
            held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            await asyncio.sleep(0.05)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert await asyncio.wait_for(reader.read(), 2) == b""
            writer.close()
            for _, one in held:
                one.close()
            await asyncio.sleep(0.05)
            assert (await route.complete({"prompt": "x"})).status == 200

    check(test)


@pytest.fixture
def certificate(tmp_path: Path) -> dict[str, str]:
    return make_certificate(tmp_path)


def test_tls(certificate: dict[str, str]) -> None:
    async def test() -> None:
        async with rig(lone(), tls=certificate, header_seconds=0.5) as route:
            url = route.url.replace("http:", "https:") + "/v1/completions"
            trusted = ssl.create_default_context(cafile=certificate["certificate"])
            async with route.client.post(url, json={"prompt": "x"}, ssl=trusted) as response:
                assert response.status == 200
            assert b" 200 " not in await raw(route, head(b"Content-Length: 14") + BODY)
            began = time.monotonic()
            await raw(route, b"")
            assert time.monotonic() - began < 2

    check(test)


def test_a_certificate_that_is_no_use(certificate: dict[str, str], tmp_path: Path) -> None:
    for wrong in (tmp_path / "none.pem", Path(certificate["certificate"])):
        with pytest.raises(ConfigError) as caught:
            load_tls(RouterTlsSection(certificate=Path(certificate["certificate"]), key=wrong))
        assert caught.value.field == "router.tls"
