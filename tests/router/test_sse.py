"""Where events end, and what they say."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deeplink.router import sse

from .fake_engine import CHUNKS

WHOLE = b"".join(CHUNKS)


@settings(deadline=None)
@given(st.lists(st.integers(0, len(WHOLE)), max_size=12), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_bytes_are_the_same_however_they_arrive(cuts: list[int], line: bytes) -> None:
    data = WHOLE.replace(b"\n", line)
    edges = [0, *sorted(cuts), len(data)]
    events = sse.Events()
    parts = [events.feed(data[a:b]) for a, b in pairwise(edges)]
    parts.append(events.end())
    assert b"".join(parts) == data
    assert events.done
    for part in parts[:-1]:
        assert not part or part.endswith((b"\n\n", b"\r\n\r\n", b"\r\r"))


def test_half_an_event_is_held_back() -> None:
    events = sse.Events()
    assert events.feed(b"data: 1\n\ndata: 2") == b"data: 1\n\n"
    assert events.feed(b"\n\n") == b"data: 2\n\n"


def test_an_event_without_end_does_not_fill_memory() -> None:
    events = sse.Events()
    piece = b"data: " + b"x" * (1 << 20)
    assert sum(len(events.feed(piece)) for _ in range(10)) > sse.MAX_EVENT
    assert len(events.end()) <= sse.MAX_EVENT
    events.feed(piece * 5)
    assert events.torn
    events.feed(b"\n\n")
    assert not events.torn


@pytest.mark.parametrize(
    ("data", "done"),
    [
        (b"data: [DONE]\n\n", True),
        (b"data:[DONE]\r\n\r\n", True),
        (b"data: 1\n\ndata: [DONE]\n\n", True),
        (b'data: "data: [DONE]"\n\n', False),
        (b"data: x data: [DONE]\n\n", False),
        (b"data: [DONE]\n\ndata: 1\n\n", False),
        (b"data: 1\n\n", False),
    ],
)
def test_done(data: bytes, done: bool) -> None:
    events = sse.Events()
    events.feed(data)
    events.end()
    assert events.done is done


def test_done_without_its_blank_line() -> None:
    events = sse.Events()
    assert events.feed(b"data: 1\n\ndata: [DONE]") == b"data: 1\n\n"
    assert events.end() == b"data: [DONE]"
    assert events.done


def test_first_data() -> None:
    assert sse.first_data(b": hi\n\n") == b""
    assert sse.first_data(b": hi\n\nevent: x\ndata: 1\ndata:2\n\ndata: 3\n\n") == b"1\n2"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"error": {"message": "no", "code": 500}}', "no"),
        (b'{"object": "error", "message": "no", "code": 400}', "no"),
        (b'{"error": "no"}', "no"),
    ],
)
def test_errors_are_seen(data: bytes, message: str) -> None:
    error = sse.error_in(data)
    assert error is not None
    assert error["message"] == message


@pytest.mark.parametrize("data", [b"", b"[DONE]", b'{"error": null}', b'"error"', b'{"choices": [{"text": "error"}]}'])
def test_what_is_no_error(data: bytes) -> None:
    assert sse.error_in(data) is None
