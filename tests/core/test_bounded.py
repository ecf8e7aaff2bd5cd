"""Reading a body ends: with its end, with the limit, or with the deadline, whatever the peer does."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from deeplink import bounded

SECONDS = 10.0


@contextlib.contextmanager
def answer(*pieces: bytes, drips: bool = False) -> Iterator[http.client.HTTPResponse]:
    """Of a peer that sends these pieces and leaves; or, where it `drips`, goes on with a byte now and then."""
    ours, theirs = socket.socketpair()
    ours.settimeout(SECONDS)

    def send() -> None:
        with theirs, contextlib.suppress(OSError):
            for piece in (b"HTTP/1.1 200 OK\r\n", *pieces):
                theirs.sendall(piece)
            while drips:
                theirs.sendall(b".")
                time.sleep(0.02)

    threading.Thread(target=send, daemon=True).start()
    with ours, http.client.HTTPResponse(ours) as response:
        response.begin()
        yield response


@pytest.mark.parametrize(
    ("pieces", "body"),
    [
        ((b"Content-Length: 4\r\n\r\nbo", b"dy"), b"body"),
        ((b"Transfer-Encoding: chunked\r\n\r\n2\r\nbo\r\n", b"2\r\ndy\r\n0\r\n\r\n"), b"body"),
        ((b"\r\nbo", b"dy"), b"body"),
        ((b"Content-Length: 0\r\n\r\n",), b""),
    ],
    ids=["length", "chunks", "until the end", "empty"],
)
def test_all_of_it(pieces: tuple[bytes, ...], body: bytes) -> None:
    with answer(*pieces) as response:
        assert bounded.read(response, 4, time.monotonic() + SECONDS) == body


@pytest.mark.parametrize("drips", [False, True])
def test_more_than_the_limit_is_seen_and_left(drips: bool) -> None:
    with answer(b"\r\n0123456789", drips=drips) as response:
        assert bounded.read(response, 4, time.monotonic() + SECONDS) == b"01234"


def test_a_byte_now_and_then_does_not_hold_the_deadline_up() -> None:
    with answer(b"\r\n", drips=True) as response, pytest.raises(TimeoutError, match="in time"):
        bounded.read(response, 1 << 20, time.monotonic() + 0.2)
