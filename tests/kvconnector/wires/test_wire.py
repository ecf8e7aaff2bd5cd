"""Sockets with deadlines."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable

import numpy as np
import pytest
from sockets import SECRET, Ends, InThread, drain, eventually, soon

from deeplink.errors import DeadlineExceeded, DeeplinkError, PeerGone, ProtocolError
from deeplink.kvconnector.wires import greeting, wire
from deeplink.kvconnector.wires.listener import Listener


def dead_after(sock: socket.socket) -> tuple[int, ...]:
    """Whether it is kept alive, after how many seconds it is probed, how often, how many times, and when it is given
    up (ms)."""
    names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
    return (
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
        *(sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names),
    )


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system has no such option")
def test_a_link_that_was_cut_is_noticed_on_both_sides() -> None:
    """An idle connection a firewall forgot is broken before a handoff waits on it."""
    served: list[tuple[int, ...]] = []
    listener = Listener("127.0.0.1", SECRET, "test", lambda sock: served.append(dead_after(sock)))
    with wire.connect(listener.address, soon()) as sock:
        greeting.greet(sock, SECRET, "test", server=False, deadline=soon())
        assert dead_after(sock) == (1, 30, 10, 3, 60_000)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert drain(sock) == b""
    assert served == [(1, 30, 10, 3, 60_000)]
    listener.close()


def test_a_system_without_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "TCP_USER_TIMEOUT", raising=False)
    with socket.socket() as sock:
        wire.tune(sock)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    wire.tune(sock)  # a peer that was gone before it was let in


def test_drop_by_drop_is_no_way_around_the_deadline(ends: Ends) -> None:
    began = time.monotonic()
    side = InThread(lambda: wire.receive(ends[0], 1000, soon(0.4)))
    while not side.done and time.monotonic() < began + 20:
        ends[1].sendall(b"x")
        time.sleep(0.02)
    with pytest.raises(DeadlineExceeded):
        side.join()


def test_a_peer_that_does_not_read(ends: Ends) -> None:
    with pytest.raises(DeadlineExceeded, match="does not take"):
        wire.send(ends[0], bytes(64 << 20), soon(0.2))


@pytest.mark.parametrize(
    "call",
    [
        lambda sock, deadline: wire.send(sock, b"x", deadline),
        lambda sock, deadline: wire.receive(sock, 1, deadline),
        lambda sock, deadline: wire.connect("127.0.0.1:1", deadline),
    ],
)
def test_a_deadline_that_has_passed(ends: Ends, call: Callable[[socket.socket, float], object]) -> None:
    with pytest.raises(DeadlineExceeded):
        call(ends[0], time.monotonic() - 1)


def test_a_peer_that_is_gone(ends: Ends) -> None:
    ends[1].close()
    with pytest.raises(PeerGone):
        wire.receive(ends[0], 1, soon())
    with pytest.raises(PeerGone):
        wire.send(ends[0], bytes(1 << 20), soon())
    ends[0].close()
    with pytest.raises(PeerGone):
        wire.receive(ends[0], 1, soon())
    with pytest.raises(PeerGone):
        wire.readable(ends[0], 0)


def test_nothing_more_is_read_than_asked_for(ends: Ends) -> None:
    ends[1].sendall(b"abcdef")
    assert wire.receive(ends[0], 3, soon()) == b"abc"
    assert wire.receive(ends[0], 0, soon()) == b""
    ends[1].close()
    assert drain(ends[0]) == b"def"


@pytest.mark.parametrize(
    "address",
    [
        "",
        "127.0.0.1",
        "127.0.0.1:",
        ":80",
        "127.0.0.1:port",
        "127.0.0.1:-1",
        "127.0.0.1:99999",
        "127.0.0.1:1",
        "[::1]:1",
        "..:1",
        "a" * 300 + ":1",
        "nul\0host:1",
        "host.invalid:1",
    ],
)
def test_addresses_nobody_is_at(address: str) -> None:
    with pytest.raises(DeeplinkError) as caught:
        wire.connect(address, soon())
    assert isinstance(caught.value, (PeerGone, ProtocolError, DeadlineExceeded))


def test_a_descriptor_is_not_reused_under_a_call(ends: Ends) -> None:
    """The kernel wakes whoever polls the old socket, but then looks at whatever has its number by then."""
    shared, number = wire.Shared(ends[0]), ends[0].fileno()
    waiting = InThread(lambda: _receive_from(shared))
    eventually(lambda: shared._users == 1)
    with shared.use() as sock:
        shared.close()
        others = [end for _ in range(5) for end in socket.socketpair()]
        assert number not in {other.fileno() for other in others}
        assert sock.fileno() == number
        with pytest.raises(PeerGone):
            waiting.join()
    assert sock.fileno() == -1
    with pytest.raises(PeerGone), shared.use():
        raise AssertionError("a closed connection was given out")
    shared.close()
    for other in others:
        other.close()


def _receive_from(shared: wire.Shared) -> bytes:
    with shared.use() as sock:
        return wire.receive(sock, 1, soon(60))


def test_many_views_in_few_calls(ends: Ends) -> None:
    """More than one call takes, more than the socket holds, some of them empty, cut differently on the two ends."""
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, 3_000_000, np.uint8).tobytes()
    cuts = [np.unique(np.r_[0, rng.integers(0, len(data), count), len(data)]) for count in (500, 301)]
    sources, targets = ([data[a:b] for a, b in itertools.pairwise(cut)] for cut in cuts)
    landed = [bytearray(len(part)) for part in targets]
    views = [memoryview(b"").toreadonly(), *sources, b"", b""]
    sending = InThread(lambda: wire.send_all(ends[0], views, soon()))
    wire.receive_into_all(ends[1], [memoryview(bytearray()), *map(memoryview, landed), memoryview(bytearray())], soon())
    sending.join()
    assert landed == targets
    wire.send_all(ends[0], [], soon())
    wire.receive_into_all(ends[1], [], soon())


def test_many_views_end_by_the_deadline_and_with_the_peer(ends: Ends) -> None:
    target = [memoryview(bytearray(10))] * 2
    ends[0].sendall(b"x" * 15)
    with pytest.raises(DeadlineExceeded):
        wire.receive_into_all(ends[1], target, soon(0.05))
    with pytest.raises(DeadlineExceeded):
        wire.send_all(ends[0], [bytes(16 << 20)] * 2, soon(0.05))
    ends[0].close()
    with pytest.raises(PeerGone):
        wire.receive_into_all(ends[1], [memoryview(bytearray(64 << 20))], soon())
    with pytest.raises(PeerGone):
        wire.send_all(ends[1], [bytes(16 << 20)], soon())


def test_a_reader_sleeps_until_much_has_come_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with the end of the stream, and when it gives up."""
    option = (socket.SOL_SOCKET, socket.SO_RCVLOWAT)
    asked: list[int] = []
    poll = wire._poll

    def watched(sock: socket.socket, event: int, seconds: float) -> int:
        asked.append(sock.getsockopt(*option))
        return poll(sock, event, seconds)

    monkeypatch.setattr(wire, "_poll", watched)
    with socket.create_server(("127.0.0.1", 0)) as server:
        writer = socket.create_connection(server.getsockname())
        reader, _ = server.accept()
    target = bytearray(100_000)
    reading = InThread(lambda: wire.receive_into(reader, memoryview(target), soon()))
    eventually(lambda: asked)
    writer.sendall(b"x" * 60_000)
    eventually(lambda: target[59_999])  # what has come is taken some time although it is less
    writer.sendall(b"x" * 40_000)
    reading.join()
    assert target == b"x" * 100_000
    assert asked[0] == 100_000
    assert reader.getsockopt(*option) == 1
    with pytest.raises(DeadlineExceeded):
        wire.receive_into(reader, memoryview(target), soon(0.05))
    assert reader.getsockopt(*option) == 1
    writer.sendall(b"x")
    assert wire.readable(reader, 5)
    reading = InThread(lambda: wire.receive_into(reader, memoryview(target), soon()))
    writer.close()
    with pytest.raises(PeerGone):
        reading.join()
    reader.close()


def test_a_peer_that_closed_with_its_window_shut() -> None:
    """It had read all there was, so its kernel resets nothing, and asks for nothing more."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        writer = socket.create_connection(server.getsockname())
        reader, _ = server.accept()
    sending = InThread(lambda: wire.send(writer, bytes(64 << 20), soon(8)))
    eventually(lambda: reader.recv(1, socket.MSG_PEEK))
    time.sleep(0.2)  # until nothing more fits
    reader.shutdown(socket.SHUT_WR)
    began = time.monotonic()
    with pytest.raises(PeerGone):
        sending.join()
    assert time.monotonic() - began < 4
    reader.close()
    writer.close()
