"""A listener in a rough neighbourhood."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from sockets import InThread, dial, drain, eventually, soon

from deeplink.errors import PeerGone, ProtocolError, Refused
from deeplink.kvconnector.wires import greeting, wire
from deeplink.kvconnector.wires import listener as module
from deeplink.kvconnector.wires.listener import Listener

SECRET = b"a secret for tests only, 32 byte"
Make = Callable[..., Listener]


def echo(sock: socket.socket) -> None:
    while True:
        wire.send(sock, wire.receive(sock, 1, soon(60)), soon(60))


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Listener] = []

    def _make(serve: Callable[[socket.socket], None] = echo) -> Listener:
        made.append(Listener("127.0.0.1", SECRET, "test", serve))
        return made[-1]

    yield _make
    for listener in made:
        listener.close()


def visit(listener: Listener, secret: bytes = SECRET) -> socket.socket:
    sock = wire.connect(listener.address, soon())
    try:
        greeting.greet(sock, secret, "test", server=False, deadline=soon())
    except BaseException:
        sock.close()
        raise
    return sock


def works(listener: Listener) -> bool:
    with visit(listener) as sock:
        wire.send(sock, b"!", soon())
        return wire.receive(sock, 1, soon()) == b"!"


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.0\r\n\r\n-----", bytes(100), b"\xff" * 5000, greeting.MAGIC + bytes(48)]
)
def test_garbage_on_the_port(make: Make, garbage: bytes) -> None:
    listener = make()
    with dial(listener.address) as sock:
        sock.sendall(garbage)
        assert len(drain(sock)) <= 52  # a greeting at most, then the end
    assert works(listener)


def test_a_silent_peer_is_sent_away_after_the_greeting_time(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GREETING_SECONDS", 0.3)
    listener = make()
    with dial(listener.address) as sock:
        began = time.monotonic()
        assert drain(sock).startswith(greeting.MAGIC)
        assert time.monotonic() - began < 8
    eventually(lambda: not listener._open)


def test_a_wrong_secret_is_refused_on_both_sides(make: Make) -> None:
    served = threading.Event()
    listener = make(lambda sock: served.set())
    with pytest.raises(Refused):
        visit(listener, SECRET + b"x")
    eventually(lambda: not listener._open)
    assert not served.is_set()


def test_more_peers_than_allowed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 3)
    listener = make()
    guests = [visit(listener) for _ in range(3)]
    with pytest.raises(PeerGone):
        visit(listener)
    for guest in guests:  # those inside are not disturbed
        wire.send(guest, b"!", soon())
        assert wire.receive(guest, 1, soon()) == b"!"
    guests.pop().close()
    eventually(lambda: len(listener._open) < 3)
    assert works(listener)
    for guest in guests:
        guest.close()


def test_one_peers_error_ends_that_peer_alone(make: Make) -> None:
    def serve(sock: socket.socket) -> None:
        if wire.receive(sock, 1, soon()) == b"x":
            raise ProtocolError("x is not said here")
        echo(sock)

    listener = make(serve)
    good, bad = visit(listener), visit(listener)
    wire.send(bad, b"x", soon())
    assert drain(bad) == b""
    wire.send(good, b"ab", soon())
    assert wire.receive(good, 1, soon()) == b"b"
    good.close()
    bad.close()


def test_close_breaks_every_connection_and_lets_nobody_in(make: Make) -> None:
    listener = make()
    guests = [visit(listener) for _ in range(4)]
    listener.close()
    for guest in guests:
        assert drain(guest) == b""
        guest.close()
    with pytest.raises(PeerGone):
        visit(listener)
    listener.close()  # again does nothing
    eventually(lambda: not listener._open)


def test_nobody_slips_in_while_it_closes(make: Make) -> None:
    for _ in range(20):
        listener = make()
        stop = threading.Event()
        inside: list[socket.socket] = []

        def storm(listener: Listener = listener, stop: threading.Event = stop, inside: list = inside) -> None:  # type: ignore[type-arg]
            while not stop.is_set():
                try:
                    inside.append(visit(listener))
                except (PeerGone, ProtocolError):
                    return

        visitors = [InThread(storm) for _ in range(3)]
        eventually(lambda inside=inside: len(inside) > 3)  # type: ignore[misc]
        listener.close()
        stop.set()
        for visitor in visitors:
            visitor.join()
        for sock in inside:
            sock.settimeout(10)
            assert drain(sock) == b""
            sock.close()


def test_a_failed_accept_is_not_the_end(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Out of file descriptors, or a peer that has gone again: it passes."""
    listener = make()
    real = listener._socket

    class Failing:
        left = 3

        def accept(self) -> tuple[socket.socket, object]:
            if Failing.left:
                Failing.left -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return real.accept()

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

    listener._socket = Failing()  # type: ignore[assignment]
    assert works(listener)  # ends the accept the thread is in; the next three fail
    assert works(listener)
    assert Failing.left == 0
    assert "Too many open files" in caplog.text
