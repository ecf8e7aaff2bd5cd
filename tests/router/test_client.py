"""What a client's bytes become, however they are cut and whatever they are."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httptools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deeplink.router.client import LINGER_SECONDS, MAX_WAITING, Client
from deeplink.router.clients import Clients
from deeplink.router.head import MAX_HEAD, MAX_HEADERS, MAX_LINE, Head

from .fake_wire import Echo, Wire

DEADLINE = 10.0


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test(), DEADLINE)

    asyncio.run(bounded())


def connection(api: Echo, seconds: float = 10.0) -> tuple[Client, Wire]:
    clients = Clients(api, 10, seconds)
    client = Client(clients, asyncio.get_running_loop())
    return client, Wire(client)


class Reader:
    """The answers in some bytes."""

    def __init__(self, data: bytes) -> None:
        self.found: list[tuple[int, bytes]] = []
        parser = httptools.HttpResponseParser(self)
        self.parser = parser
        parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.body = b""

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.found.append((self.parser.get_status_code(), self.body))


def sent(body: bytes, chunks: Sequence[int], target: str) -> bytes:
    """A request with this body, in one piece or in chunks of these sizes."""
    start = f"POST {target} HTTP/1.1\r\nHost: h\r\nX-A: b\r\n".encode()
    if not chunks:
        return start + b"Content-Length: %d\r\n\r\n" % len(body) + body
    framed, rest = b"", body
    for size in chunks:
        if rest:
            framed += b"%x\r\n%b\r\n" % (len(rest[:size]), rest[:size])
            rest = rest[size:]
    if rest:
        framed += b"%X;a=b\r\n%b\r\n" % (len(rest), rest)
    return start + b"Transfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\nX-Trailer: t\r\n\r\n"


requests = st.lists(
    st.tuples(
        st.binary(max_size=60),
        st.lists(st.integers(1, 20), max_size=4),
        st.sampled_from(["/v1/completions", "/a?b=c", "/x/%20y"]),
    ),
    min_size=1,
    max_size=6,
)
cuts = st.lists(st.integers(0, 400), max_size=12)


def pieces(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[one:other] for one, other in itertools.pairwise(ends)]


@settings(max_examples=80, deadline=None)
@given(requests, cuts, st.booleans())
def test_requests_are_the_same_however_they_are_cut(
    asked: list[tuple[bytes, list[int], str]], places: list[int], later: bool
) -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        api = Echo(loop.call_soon if later else None)
        _, wire = connection(api)
        for piece in pieces(b"".join(sent(*one) for one in asked), places):
            wire.protocol.data_received(piece)
            await asyncio.sleep(0)
        while len(api.requests) < len(asked) or not wire.written:
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert [(head.target, body) for head, body in api.requests] == [(target, body) for body, _, target in asked]
        assert Reader(bytes(wire.written)).found == [(200, body) for body, _, _ in asked]
        assert not api.refusals
        assert not wire.closed

    run(test)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=80), requests.map(lambda one: sent(*one[0]))), max_size=4), cuts, cuts)
def test_whatever_comes_is_a_request_or_is_refused_once(
    parts: list[bytes], places: list[int], holes: list[int]
) -> None:
    """Also requests with bytes missing or changed."""

    async def test() -> None:
        data = bytearray(b"".join(parts))
        for number, place in enumerate(holes):
            if data and number % 2:
                data[place % len(data)] ^= 1 << (place % 8)
            elif data:
                del data[place % len(data)]
        api = Echo()
        client, wire = connection(api)
        for piece in pieces(bytes(data), places):
            wire.protocol.data_received(piece)
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        answers = Reader(bytes(wire.written)).found
        assert [body for status, body in answers if status == 200] == [body for _, body in api.requests]
        assert len(api.refusals) == len(answers) - len(api.requests) <= 1
        if api.refusals:
            assert answers[-1][0] == api.refusals[0].status
            assert wire.ended
            wire.protocol.data_received(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
            assert len(Reader(bytes(wire.written)).found) == len(answers)
            client.late()
            assert wire.closed

    run(test)


def lines(*more: bytes) -> bytes:
    return b"".join(line + b"\r\n" for line in (b"POST /a HTTP/1.1", b"Host: h", *more)) + b"\r\n"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (lines(b"Content-Length: 2000000"), "larger than 1048576"),
        (lines(b"Transfer-Encoding: chunked") + b"ffffff\r\n" + b"x" * 1_048_577, "larger than 1048576"),
        (lines(b"X: " + b"x" * MAX_LINE), "a header is longer"),
        (lines(*[b"X%d: x" % n for n in range(MAX_HEADERS)]), "headers"),
        (lines(*[b"X: " + b"x" * 8000] * (MAX_HEAD // 8000 + 1)), "65536"),
        (b"GET /" + b"x" * MAX_LINE + b" HTTP/1.1\r\nHost: h\r\n\r\n", "the target is longer"),
        (b"GET /" + b"x" * 2 * MAX_HEAD, "bytes that are not of the request's body"),
        (b"\r\n" * MAX_HEAD, "bytes that are not of the request's body"),
        (lines(b"X: " + b"x" * 2 * MAX_HEAD)[:-4], "bytes that are not of the request's body"),
        (
            lines(b"Transfer-Encoding: chunked") + b"1;" + b"x" * 2 * MAX_HEAD,
            "bytes that are not of the request's body",
        ),
        (lines(b"Transfer-Encoding: gzip, chunked"), "chunked"),
        (lines(b"Upgrade: websocket", b"Connection: upgrade") + b"more", "no other protocol"),
        (lines(b"Host: other"), "two headers host"),
        (lines(b"Authorization: a", b"authorization: b"), "two headers authorization"),
        (b"POST /a HTTP/1.1\r\n\r\n", "no host"),
        (b"POST /a HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "chunked"),
        (b"GET /a HTTP/2.0\r\nHost: h\r\n\r\n", "version"),
        (b"GET /a\r\n\r\n", "version"),
        (b"GET /a ICE/1.0\r\n\r\n", "HTTP/1.1"),
        (b"CONNECT h:1 HTTP/1.1\r\nHost: h\r\n\r\n", "no other protocol"),
        (b"GET a HTTP/1.1\r\nHost: h\r\n\r\n", ""),
        (b"GET /%ff HTTP/1.1\r\nHost: h\r\n\r\n", "not a path"),
        (lines() * (MAX_WAITING + 2), f"more than {MAX_WAITING} requests"),
    ],
)
@pytest.mark.parametrize("size", [8000, 1000])
def test_limits(data: bytes, why: str, size: int) -> None:
    async def test() -> None:
        api = Echo(lambda answer: None)  # a request that is accepted is never answered
        client, wire = connection(api)
        for start in range(0, len(data), size):
            wire.protocol.data_received(data[start : start + size])
        if why.startswith("more than 32"):
            assert len(api.requests) == 1
            client.answer(200, b"", b"")
            api.later = None
            client.done()
            for _ in range(2 * MAX_WAITING + 4):
                await asyncio.sleep(0)
        assert [str(one) for one in api.refusals if why in str(one)], [str(one) for one in api.refusals]
        assert Reader(bytes(wire.written)).found[-1][0] in (400, 413)

    run(test)


def test_a_client_that_waits_for_leave_gets_it_once_and_only_if_its_body_may_come() -> None:
    async def test() -> None:
        api = Echo()
        _, wire = connection(api)
        wire.protocol.data_received(lines(b"Expect: 100-continue", b"Content-Length: 3"))
        assert bytes(wire.written) == b"HTTP/1.1 100 Continue\r\n\r\n"
        wire.protocol.data_received(b"abc")
        assert Reader(bytes(wire.written)).found[-1] == (200, b"abc")
        _, wire = connection(Echo(most=2))
        wire.protocol.data_received(lines(b"Expect: 100-continue", b"Content-Length: 3"))
        assert wire.written.startswith(b"HTTP/1.1 413 ")
        _, wire = connection(Echo())
        wire.protocol.data_received(lines(b"Expect: 100-continue"))
        assert Reader(bytes(wire.written)).found == [(200, b"")]

    run(test)


def test_what_comes_before_its_turn_is_not_read_without_end() -> None:
    async def test() -> None:
        answers: list[Callable[[], None]] = []
        api = Echo(answers.append)
        _, wire = connection(api)
        wire.protocol.data_received(lines())
        half = lines(b"Content-Length: 1000000")
        wire.protocol.data_received(half)
        assert not wire.paused
        wire.protocol.data_received(b"x" * MAX_HEAD)
        assert wire.paused
        answers.pop()()
        assert not wire.paused
        wire.protocol.data_received(b"x" * (1_000_000 - MAX_HEAD))
        assert [len(body) for _, body in api.requests] == [0, 1_000_000]

    run(test)


class Tap:
    """What a stream comes from."""

    def __init__(self) -> None:
        self.open = True

    def pause(self) -> None:
        self.open = False

    def resume(self) -> None:
        self.open = True


@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_a_stream(version: str) -> None:
    async def test() -> None:
        client_of: list[Any] = []

        class Streams(Echo):
            def start(self, head: Head, body: bytes, client: Client) -> None:
                client.runs(self)
                client_of.append(client)

        _, wire = connection(Streams())
        wire.protocol.data_received(f"GET /a HTTP/{version}\r\nHost: h\r\n\r\n".encode())
        client, tap = client_of[0], Tap()
        client.begin(200, b"X-A: b\r\n", tap)
        assert not wire.written, "the head goes with the first bytes"
        client.more(b"one")
        client.more(b"")
        client.pause_writing()
        assert not tap.open
        client.resume_writing()
        assert tap.open
        client.more(b"two")
        client.finish()
        client.done()
        if version == "1.1":
            assert Reader(bytes(wire.written)).found == [(200, b"onetwo")]
            assert not wire.closed
        else:
            assert wire.written.endswith(b"\r\n\r\nonetwo")
            assert wire.closed

    run(test)


def test_a_client_that_reads_nothing_does_not_stay() -> None:
    async def test() -> None:
        clients = Clients(Echo(lambda answer: None), 10, 10.0)
        client = Client(clients, asyncio.get_running_loop())
        wire = Wire(client)
        wire.protocol.data_received(lines())
        assert client.until == float("inf")
        client.pause_writing()
        assert client.until < float("inf")
        client.late()
        assert wire.closed
        assert clients.api.cancelled == 1  # type: ignore[attr-defined]

    run(test)


def test_a_task_that_is_cancelled_before_it_began_still_cleans_up() -> None:
    async def test() -> None:
        cleaned = asyncio.Event()

        class Tasks(Echo):
            def start(self, head: Head, body: bytes, client: Client) -> None:
                client.task(self.work())

            async def work(self) -> None:
                try:
                    await asyncio.sleep(60)
                finally:
                    cleaned.set()

        clients = Clients(Tasks(), 10, 10.0)
        wire = Wire(Client(clients, asyncio.get_running_loop()))
        wire.protocol.data_received(lines())
        wire.close()
        await asyncio.wait_for(cleaned.wait(), 2)
        await clients.close(1.0)

    run(test)


def test_a_fault_of_our_own_is_one_requests(caplog: pytest.LogCaptureFixture) -> None:
    quoted = " ".join(("my", "prompt"))

    async def test() -> None:
        class Broken(Echo):
            def start(self, head: Head, body: bytes, client: Client) -> None:
                if head.target == "/a":
                    raise KeyError(quoted)
                client.task(self.work())

            async def work(self) -> None:
                raise KeyError(quoted)

        _, wire = connection(Broken())
        wire.protocol.data_received(lines() + lines().replace(b"/a", b"/b"))
        for _ in range(10):
            await asyncio.sleep(0)
        assert [status for status, _ in Reader(bytes(wire.written)).found] == [500, 500]
        assert not wire.closed

    run(test)
    assert "KeyError" in caplog.text
    assert "my prompt" not in caplog.text
    assert LINGER_SECONDS < 10
