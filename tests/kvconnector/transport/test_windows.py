"""The bytes of a batch through a socket, by compiled loops and by the interpreter: on the wire they are the same."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from deeplink.errors import DeadlineExceeded, PeerGone
from deeplink.kvconnector.transport import tcp

if sys.platform != "linux":
    pytest.skip("the loops call Linux's sockets", allow_module_level=True)
windows = pytest.importorskip("deeplink.kvconnector.transport.windows", reason="numba is not installed")

SECONDS = 10.0
HEAD = b"what comes before"


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    yield from _ends()


def _ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, tcp.LOCAL_BUFFER)  # or it grows
        one.connect(server.getsockname())
        with server.accept()[0] as other:
            yield one, other


def way(sock: socket.socket, compiled: bool) -> tcp._Bytes:
    found = tcp._Bytes(sock)
    found._windows = windows.of(sock) if compiled else None
    return found


def cut(data: bytes | bytearray, lengths: list[int]) -> list[memoryview]:
    stops = np.cumsum(lengths).tolist()
    return [memoryview(data)[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]


LENGTHS = st.lists(
    st.one_of(st.integers(0, 40).map(lambda lines: lines * 64), st.integers(0, 1000), st.just((256 << 10) + 64)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.booleans(), st.booleans(), st.booleans())
def test_both_ways_are_one(lengths: list[int], sends: bool, takes: bool, late: bool) -> None:
    """Whoever of the two compiles, and whichever comes first."""
    data = np.random.default_rng(len(lengths)).bytes(sum(lengths))
    target = bytearray(len(data))
    until = time.monotonic() + SECONDS
    with _each(_ends()) as (one, other):
        found: list[int] = []
        sending = threading.Thread(
            target=lambda: found.append(way(one, sends).send(HEAD, cut(data, lengths), until)), daemon=True
        )
        if not late:
            sending.start()
        taking: list[tuple[int, int]] = []

        def take() -> None:
            assert other.recv(len(HEAD), socket.MSG_WAITALL) == HEAD
            taking.append(way(other, takes).take(cut(target, lengths), until))

        receiving = threading.Thread(target=take, daemon=True)
        receiving.start()
        if late:
            sending.start()
        sending.join(SECONDS)
        one.sendall(b"\1" * 8)
        receiving.join(SECONDS)
    assert target == data
    assert found == [xxhash.xxh3_64_intdigest(data)]
    assert taking == [(found[0], 0x0101010101010101)]


class _each:
    """A generator as a context manager, for tests whose arguments hypothesis draws."""

    def __init__(self, made: Iterator[tuple[socket.socket, socket.socket]]) -> None:
        self._made = made

    def __enter__(self) -> tuple[socket.socket, socket.socket]:
        return next(self._made)

    def __exit__(self, *raised: object) -> None:
        next(self._made, None)


BODY = 64 << 20
"""More than the kernel takes of a push that nobody reads."""


def test_a_peer_that_reads_nothing(ends: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(DeadlineExceeded, match="does not take"):
        way(ends[0], True).send(HEAD, [memoryview(bytearray(BODY))], time.monotonic() + 0.1)


def test_a_peer_that_leaves_while_it_is_sent_to(ends: tuple[socket.socket, socket.socket]) -> None:
    timer = threading.Timer(0.1, ends[1].close)
    timer.start()
    with pytest.raises(PeerGone):
        way(ends[0], True).send(HEAD, [memoryview(bytearray(BODY))], time.monotonic() + SECONDS)
    timer.join(SECONDS)


def test_a_socket_that_is_shut_while_it_waits(ends: tuple[socket.socket, socket.socket]) -> None:
    timer = threading.Timer(0.1, ends[1].shutdown, [socket.SHUT_RDWR])
    timer.start()
    with pytest.raises(PeerGone):
        way(ends[1], True).take([memoryview(bytearray(4096))], time.monotonic() + SECONDS)
    timer.join(SECONDS)


@pytest.mark.parametrize("sent", [0, 64, 4096, 300 << 10])
def test_bytes_that_do_not_come(ends: tuple[socket.socket, socket.socket], sent: int) -> None:
    """Whatever number of them the kernel was asked to wake for."""
    ends[0].sendall(bytes(sent))
    with pytest.raises(DeadlineExceeded, match="sends nothing"):
        way(ends[1], True).take([memoryview(bytearray(1 << 20))], time.monotonic() + 0.2)
    assert ends[1].getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1


def test_a_slow_peer(ends: tuple[socket.socket, socket.socket]) -> None:
    """Less comes at a time than the kernel was asked to wake for."""
    target = bytearray(64 << 10)

    def trickle() -> None:
        for _ in range(16):
            ends[0].sendall(b"\2" * (4 << 10))
            time.sleep(0.01)
        ends[0].sendall(bytes(8))

    thread = threading.Thread(target=trickle, daemon=True)
    thread.start()
    way(ends[1], True).take([memoryview(target)], time.monotonic() + SECONDS)
    thread.join(SECONDS)
    assert target == b"\2" * len(target)
