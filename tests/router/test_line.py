"""What an engine's bytes become, however they are cut and whatever they are."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deeplink.router.head import MAX_HEAD
from deeplink.router.line import BEFORE, MIDDLE, NOT_HTTP, TOO_LARGE, Line

from .fake_wire import Asker, Pool, Wire
from .test_client import cuts, pieces

OK = b"HTTP/1.1 200 OK\r\nContent-Type: a/b\r\n"


def call(pool: Pool | None = None) -> tuple[Pool, Asker, Wire]:
    pool, asker = pool or Pool(), Asker()
    return pool, asker, Wire(Line(pool, asker, b"HEAD", b"BODY"))


def chunked(body: bytes) -> bytes:
    return b"Transfer-Encoding: chunked\r\n\r\n" + (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + b"0\r\n\r\n"


bodies = st.binary(max_size=80)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(bodies, st.sampled_from(["length", "chunks", "interim"])), min_size=1, max_size=4), cuts)
def test_answers_are_the_same_however_they_are_cut(answers: list[tuple[bytes, str]], places: list[int]) -> None:
    pool, asker, wire = call()
    line = wire.protocol
    assert isinstance(line, Line)
    for number, (body, how) in enumerate(answers):
        if number:
            asker = Asker()
            line.ask(asker, b"HEAD", b"")
        data = OK + (chunked(body) if how == "chunks" else b"Content-Length: %d\r\n\r\n" % len(body) + body)
        if how == "interim":
            data = b"HTTP/1.1 103 Early Hints\r\nX: y\r\n\r\n" + data
        for piece in pieces(data, places):
            line.data_received(piece)
        assert (asker.status, asker.data, asker.whys, asker.framed) == (200, body, [""], True)
        assert pool.idle.pop() is line


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=60), bodies, cuts, cuts)
def test_whatever_comes_the_asker_is_told_the_end_once(
    garbage: bytes, body: bytes, places: list[int], holes: list[int]
) -> None:
    data = bytearray(garbage + OK + chunked(body))
    for place in holes:
        data[place % len(data)] ^= 1 << (place % 8)
    _, asker, wire = call()
    for piece in pieces(bytes(data), places):
        wire.protocol.data_received(piece)
    wire.close()
    assert len(asker.whys) == 1
    if not asker.status:
        assert asker.whys[0] in (BEFORE, NOT_HTTP)


@pytest.mark.parametrize(
    ("data", "status", "body", "why"),
    [
        (b"", 0, b"", BEFORE),
        (OK, 0, b"", BEFORE),
        (OK + b"Content-Length: 9\r\n\r\nabc", 200, b"abc", MIDDLE),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", 200, b"abc", MIDDLE),
        (OK + b"\r\nabc", 200, b"abc", ""),
        (OK + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc", 0, b"", NOT_HTTP),
        (OK + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 0, b"", NOT_HTTP),
        (b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nabc", 0, b"", NOT_HTTP),
        (OK + b"X: " + b"x" * 2 * MAX_HEAD, 0, b"", TOO_LARGE),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", ""),
    ],
)
def test_ends(data: bytes, status: int, body: bytes, why: str) -> None:
    _, asker, wire = call()
    for start in range(0, len(data), 1000):
        wire.protocol.data_received(data[start : start + 1000])
    wire.close()
    assert (asker.status, asker.data, asker.whys) == (status, body, [why])


@pytest.mark.parametrize(
    "more",
    [OK + b"Content-Length: 1\r\n\r\nx", b"junk", b"\r\n\r\nHTTP/1.1 200 OK\r\n"],
)
def test_a_line_on_which_more_came_than_was_asked_for_is_not_used_again(more: bytes) -> None:
    _pool, asker, wire = call()
    wire.protocol.data_received(OK + b"Content-Length: 3\r\n\r\nabc" + more)
    assert (asker.data, asker.whys) == (b"abc", [""])
    assert wire.closed or (wire.protocol.data_received(b"x") is None and wire.closed)


def test_a_line_that_was_closed_by_its_engine_is_not_used_again() -> None:
    pool, asker, wire = call()
    wire.protocol.data_received(OK + b"Connection: close\r\nContent-Length: 3\r\n\r\nabc")
    assert asker.whys == [""]
    assert wire.closed
    assert not pool.idle
    assert not pool.lines


def test_a_line_that_was_paused_is_read_again_by_who_asks_next() -> None:
    _pool, asker, wire = call()
    line = wire.protocol
    assert isinstance(line, Line)
    line.data_received(OK + b"Content-Length: 3\r\n\r\na")
    line.pause()
    line.pause()
    assert wire.paused
    line.data_received(b"bc")
    assert asker.whys == [""]
    assert not wire.paused


def test_dropping_ends_the_connection_and_tells_nobody() -> None:
    pool, asker, wire = call()
    line = wire.protocol
    assert isinstance(line, Line)
    line.drop()
    line.drop()
    assert wire.closed
    assert not asker.whys
    assert not pool.lines


def test_nobody_waits_any_more_when_the_connection_comes_about() -> None:
    pool, asker = Pool(), Asker()
    asker.over = True
    wire = Wire(Line(pool, asker, b"HEAD", b"BODY"))
    assert not wire.written
    assert len(pool.idle) == 1


def test_a_large_body_goes_in_pieces() -> None:
    class Slow(Wire):
        def get_write_buffer_size(self) -> int:
            return (len(self.written) - 4 - self.gone) if hasattr(self, "gone") else len(self.written)

    body = b"x" * 1_000_000
    wire = Slow(Line(Pool(), Asker(), b"HEAD", body))
    assert len(wire.written) < 600_000
    while len(wire.written) < 4 + len(body):
        wire.gone = len(wire.written) - 4
        wire.protocol.resume_writing()
    assert bytes(wire.written) == b"HEAD" + body
