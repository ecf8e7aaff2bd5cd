"""A head that came before means what the parser would have read in it, and is remembered only where that is sure."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deeplink.router.client import UPLOAD_SECONDS
from deeplink.router.head import Head, read
from deeplink.router.line import MIDDLE, Line
from deeplink.router.repeated import MAX_HEAD, PATIENCE, Repeated

from .fake_wire import Asker, Echo, Pool, Wire
from .test_client import connection, run

LENGTHS = [
    "Content-Length: %d",
    "content-length:%d",
    "CONTENT-LENGTH: %03d",
    "Content-Length:  %d",
    "Content-Length: %d ",
]
LINES = [
    "Host: h",
    "Host: other",
    "Authorization: Bearer k",
    "X-Length: Content-Length: 3",
    "Content-Length: 3",
    "Transfer-Encoding: chunked",
    "Connection: close",
    "Connection: keep-alive, x-a",
    "Expect: 100-continue",
    "X-A: b\n",
    "X-A: \r",
    " folded",
    "X-Long: " + "x" * MAX_HEAD,
    "Upgrade: h2c",
    "",
]
heads = st.builds(
    lambda start, before, length, after: (start, [*before, length, *after]),
    st.sampled_from(["POST /v1/completions", "POST /a?b=c", "GET /v1/models", "HEAD /a", "DELETE /%61", "\r\nPOST /a"]),
    st.lists(st.sampled_from(LINES), max_size=2).map(lambda lines: ["Host: h", *lines]),
    st.sampled_from(LENGTHS),
    st.lists(st.sampled_from(LINES), max_size=2),
)
bodies = st.lists(
    st.sampled_from([b"", b"abc", b"abcd", b"{}" * 40, b"\r\n\r\nContent-Length: 3\r\n\r\nabc"]), min_size=2, max_size=5
)


def sent(head: tuple[str, list[str]], body: bytes) -> bytes:
    start, lines = head
    text = "\r\n".join([f"{start} HTTP/1.1", *(line % len(body) if "%" in line else line for line in lines)])
    return text.encode() + b"\r\n\r\n" + body


def means(head: Head) -> Any:
    """All that is read in a head, but for what says how long the body is."""
    pairs = [(name.lower(), value) for name, value in head.pairs if name.lower() != b"content-length"]
    given = {name: value for name, value in head.given.items() if name != b"content-length"}
    return head.method, head.target, head.path, pairs, given, head.modern, head.keep


def whole(message: bytes) -> list[bytes]:
    return [message]


def head_first(message: bytes) -> list[bytes]:
    end = message.find(b"\r\n\r\n") + 4
    return [piece for piece in (message[:end], message[end:]) if piece]


def in_the_body(message: bytes) -> list[bytes]:
    return [piece for piece in (message[:-3], message[-3:-1], message[-1:]) if piece]


def in_the_head(message: bytes) -> list[bytes]:
    return [message[:20], message[20:]]


Cut = Callable[[bytes], list[bytes]]
CUTS: list[Cut] = [whole, head_first, in_the_body, in_the_head]


@contextmanager
def forgetful() -> Iterator[None]:
    """No head is remembered, so that the parser reads all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Repeated, "remember", lambda repeated, message, size: False)
        yield


async def served(messages: list[bytes], cut: Cut, *, most: int, later: bool) -> Any:
    """What a router's connection makes of them."""
    api = Echo(asyncio.get_running_loop().call_soon if later else None, most)
    _, wire = connection(api)
    for message in messages:
        for piece in cut(message):
            if not wire.closed:
                wire.protocol.data_received(piece)
    for _ in range(3 * len(messages)):
        await asyncio.sleep(0)
    requests = [(means(head), body) for head, body in api.requests]
    written = re.sub(rb"\r\nDate: [^\r]*", b"", wire.written)
    return requests, [str(error) for error in api.refusals], written, wire.closed, wire.ended


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(heads, bodies), min_size=1, max_size=3), st.sampled_from([1 << 20, 50]), st.booleans())
@example([(("POST /a", ["Host: h", "Expect: 100-continue", "Content-Length: %d"]), [b"abc", b"abc"])], 50, False)
def test_a_request_is_the_same_whether_its_head_was_read_or_known(
    asked: list[tuple[tuple[str, list[str]], list[bytes]]], most: int, later: bool
) -> None:
    messages = [sent(head, body) for head, several in asked for body in several]

    async def test() -> None:
        for cut in CUTS:
            known = await served(messages, cut, most=most, later=later)
            with forgetful():
                assert known == await served(messages, cut, most=most, later=later)

    run(test)


answers = st.builds(
    lambda status, lines, length, after: (f"HTTP/1.1 {status}", [*lines, length, *after]),
    st.sampled_from(["200 OK", "200 OK", "200 OK", "404 Not Found", "204 No Content", "103 Early", "101 Switching"]),
    st.lists(st.sampled_from(LINES), max_size=2),
    st.sampled_from(LENGTHS),
    st.lists(st.sampled_from([*LINES, "Content-Type: text/event-stream", "Retry-After: 3"]), max_size=2),
)


def answered(messages: list[bytes], cut: Cut) -> Any:
    pool, found = Pool(), []
    asker = Asker()
    wire = Wire(Line(pool, asker, b"HEAD", b""))
    line = wire.protocol
    assert isinstance(line, Line)
    for message in messages:
        for piece in cut(message):
            if not wire.closed:
                line.data_received(piece)
        heading = asker.heading
        passed = heading and (
            heading.passed,
            heading.streams,
            [p for p in heading.pairs if p[0].lower() != b"content-length"],
        )
        found.append((asker.status, asker.framed, asker.data, asker.whys, passed, len(pool.idle), wire.closed))
        if not pool.idle:
            break
        pool.idle.pop()
        asker = Asker()
        line.ask(asker, b"HEAD", b"")
    return found


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(answers, bodies), min_size=1, max_size=3))
@example([(("HTTP/1.1 204 No Content", ["Content-Length: %d"]), [b"", b"abc"])])
def test_an_answer_is_the_same_whether_its_head_was_read_or_known(
    said: list[tuple[tuple[str, list[str]], list[bytes]]],
) -> None:
    messages = [sent(head, body).replace(b" HTTP/1.1\r\n", b"\r\n", 1) for head, several in said for body in several]
    for cut in CUTS:
        known = answered(messages, cut)
        with forgetful():
            assert known == answered(messages, cut)


HEAD = b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\nX-A: b\r\n\r\n"


def test_another_length_is_the_same_head() -> None:
    known = Repeated[str]()
    assert known.body(HEAD % 3 + b"abc") is None
    assert known.remember(HEAD % 3 + b"abc", 3)
    known.meaning = "it"
    for body in (b"", b"abc", b"x" * 100_000):
        assert known.body(HEAD % len(body) + body) == body
        assert known.left == 0
    assert known.body(HEAD % 3 + b"ab") == b"ab"
    assert known.left == 1
    for other in (
        HEAD % 3 + b"abcd",  # another request follows
        (HEAD % 3).replace(b"X-A", b"X-B") + b"abc",
        (HEAD % 3).replace(b": 3", b": +3") + b"abc",
        (HEAD % 3).replace(b": 3", b": 0000000003") + b"abc",
        (HEAD % 3).replace(b": 3", b": 3, 3") + b"abc",
        (HEAD % 3).replace(b": 3", b": \xb3") + b"abc",
        (HEAD % 3).replace(b": 3", b": ") + b"abc",
        b"",
    ):
        assert known.body(other) is None


def test_a_body_over_the_limit_is_refused_although_its_head_is_known() -> None:
    async def test() -> None:
        api = Echo(most=10)
        _, wire = connection(api)
        for size in (3, 10, 11):
            wire.protocol.data_received(HEAD % size + b"x" * size)
        assert [len(body) for _, body in api.requests] == [3, 10]
        assert [error.status for error in api.refusals] == [413]
        assert wire.ended

    run(test)


def test_it_is_asked_once_whether_a_head_may_pass() -> None:
    async def test() -> None:
        class Asked(Echo):
            heads = 0

            def limit(self, head: Head) -> int:
                self.heads += 1
                return super().limit(head)

        api = Asked()
        _, wire = connection(api)
        for size in range(5):
            wire.protocol.data_received(HEAD % size + b"x" * size)
        wire.protocol.data_received((HEAD % 1).replace(b"X-A: b", b"X-A: c") + b"x")
        assert (api.heads, len(api.requests)) == (2, 6)
        assert api.requests[1][0] is api.requests[4][0]

    run(test)


def test_what_never_comes_again_is_seldom_remembered() -> None:
    known, count = Repeated[int](), 0
    for number in range(1000):
        message = (HEAD % 0).replace(b"X-A: b", b"X-A: %d" % number)
        assert known.body(message) is None
        count += known.remember(message, 0)
    assert 1000 // PATIENCE <= count <= 30
    for _ in range(2 * PATIENCE):
        if known.body(HEAD % 0) is not None:
            break
        known.remember(HEAD % 0, 0)
    else:
        pytest.fail("a head that came often was not remembered")


@pytest.mark.parametrize(
    ("message", "size"),
    [
        (HEAD % 3 + b"abc", 4),
        (HEAD % 3, -1),
        (HEAD % 3 + b"abcd", 3),
        (HEAD % 4 + b"abc", 3),
        ((HEAD % 3).replace(b"X-A: b", b"Content-Length: 3") + b"abc", 3),
        ((HEAD % 3).replace(b"Content-Length: 3", b"Content-Length:\t3") + b"abc", 3),
        ((HEAD % 3).replace(b"b\r\n\r\n", b"b\n\n") + b"abc", 3),
        ((HEAD % 3).replace(b"h\r\n", b"h\n") + b"abc", 3),
        ((HEAD % 3).replace(b"h\r\n", b"h\rX: \r\n") + b"abc", 3),
        ((HEAD % 3).replace(b"b\r\n", b"b" * MAX_HEAD + b"\r\n") + b"abc", 3),
        (b"POST /a HTTP/1.1\r\nHost: h\r\n\r\n", 0),
    ],
)
def test_what_is_not_surely_understood_is_not_remembered(message: bytes, size: int) -> None:
    """Even if a parser took it."""
    known = Repeated[str]()
    assert not known.remember(message, size)
    assert known.body(message) is None


def test_a_body_that_looks_like_a_message_is_a_body() -> None:
    async def test() -> None:
        inner = HEAD % 3 + b"abc"
        for head in (HEAD, HEAD.replace(b"X-A", b"X-B")):
            api = Echo()
            _, wire = connection(api)
            for piece in (inner, head % len(inner), inner, inner):
                wire.protocol.data_received(piece)
            assert [body for _, body in api.requests] == [b"abc", inner, b"abc"]

    run(test)
    inner = ANSWER % 3 + b"abc"
    for head in (ANSWER, ANSWER.replace(b"200 OK", b"404 Not Found")):
        pool, asker = Pool(), Asker()
        line = Wire(Line(pool, asker, b"HEAD", b"")).protocol
        assert isinstance(line, Line)
        for pieces, body in (([inner], b"abc"), ([head % len(inner), inner], inner), ([inner], b"abc")):
            for piece in pieces:
                line.data_received(piece)
            assert (asker.data, asker.whys) == (body, [""])
            asker = Asker()
            line.ask(asker, b"HEAD", b"")


ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"


def test_what_is_read_in_one_head_is_not_remembered_of_another() -> None:
    """Where two come in one piece, and all that tells them apart is which was first."""

    async def test() -> None:
        api = Echo()
        _, wire = connection(api)
        other = (HEAD % 3).replace(b"/a", b"/b")
        for piece in (HEAD % 3 + b"abc" + other, b"abc", HEAD % 3 + b"abc", other + b"abc"):
            wire.protocol.data_received(piece)
        assert [head.target for head, _ in api.requests] == ["/a", "/b", "/a", "/b"]
        api = Echo()
        _, wire = connection(api)
        get = b"GET /c HTTP/1.1\r\nHost: h\r\n\r\n"
        for piece in (get + other, b"abc", get, other + b"abc"):
            wire.protocol.data_received(piece)
        assert [head.target for head, _ in api.requests] == ["/c", "/b", "/c", "/b"]

    run(test)
    early = (ANSWER % 90).replace(b"200 OK", b"103 Early Hints")
    pool, asker = Pool(), Asker()
    line = Wire(Line(pool, asker, b"HEAD", b"")).protocol
    assert isinstance(line, Line)
    for pieces in ([early + ANSWER % 90, b"x" * 90], [early, ANSWER % 90 + b"x" * 90]):
        for piece in pieces:
            line.data_received(piece)
        assert (asker.status, asker.data, asker.whys) == (200, b"x" * 90, [""])
        asker = Asker()
        line.ask(asker, b"HEAD", b"")


def test_more_than_was_asked_for_ends_a_line_although_its_head_was_known() -> None:
    pool, asker = Pool(), Asker()
    wire = Wire(Line(pool, asker, b"HEAD", b""))
    line = wire.protocol
    assert isinstance(line, Line)
    line.data_received(ANSWER % 3 + b"abc")
    assert pool.idle.pop() is line
    asker = Asker()
    line.ask(asker, b"HEAD", b"")
    line.data_received(ANSWER % 3 + b"ab")
    line.data_received(b"cd")
    assert (asker.data, asker.whys) == (b"abc", [""])
    assert wire.closed
    assert not pool.idle


@pytest.mark.parametrize("leaves", [False, True])
def test_a_body_that_does_not_come_although_its_head_was_known(leaves: bool) -> None:
    async def test() -> None:
        api = Echo()
        client, wire = connection(api)
        wire.protocol.data_received(HEAD % 3 + b"abc")
        wire.protocol.data_received(HEAD % 3 + b"ab")
        assert 0 < client.until - time.monotonic() <= UPLOAD_SECONDS
        client.pause_writing()
        client.resume_writing()
        assert 0 < client.until - time.monotonic() <= UPLOAD_SECONDS
        if leaves:
            wire.close()
        else:
            client.late()
            assert [error.status for error in api.refusals] == [400]
            assert wire.ended
        wire.protocol.data_received(b"c")
        assert len(api.requests) == 1

    run(test)
    asker = Asker()
    wire = Wire(Line(Pool(), asker, b"HEAD", b""))
    wire.protocol.data_received(ANSWER % 3 + b"abc")
    assert isinstance(wire.protocol, Line)
    asker = Asker()
    wire.protocol.ask(asker, b"HEAD", b"")
    wire.protocol.data_received(ANSWER % 3 + b"ab")
    wire.close()
    assert (asker.data, asker.whys) == (b"ab", [MIDDLE])


def test_what_follows_a_body_is_another_request() -> None:
    async def test() -> None:
        api = Echo()
        client, wire = connection(api)
        for piece in (HEAD % 3 + b"abc", HEAD % 3 + b"d", b"ef" + HEAD % 3 + b"gh", b"i" + HEAD % 0 + HEAD % 0):
            wire.protocol.data_received(piece)
        assert [body for _, body in api.requests] == [b"abc", b"def", b"ghi", b"", b""]
        wire.protocol.data_received(HEAD % 3)
        wire.protocol.data_received(b"abc")
        assert client.until - time.monotonic() > UPLOAD_SECONDS, "it waits for the next request"

    run(test)


def test_a_head_in_which_two_lengths_could_be_read_is_not_remembered() -> None:
    """Should a parser ever take one."""
    pairs = [(b"Host", b"h"), (b"Content-Length", b"3")]
    assert read("POST", "/a", pairs, "1.1", True).repeats
    assert not read("POST", "/a", [*pairs, (b"Transfer-Encoding", b"chunked")], "1.1", True).repeats
    assert not read("POST", "/a", pairs[:1], "1.1", True).repeats
