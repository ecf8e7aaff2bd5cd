"""The conversation around a one-sided library, with one that does what no real one can be made to do."""

from __future__ import annotations

import ctypes
import gc
import socket
import threading
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from copier import SECRET, Copier, CopierSession, CopierTransport
from sockets import InThread, eventually, soon

from deeplink.errors import DeadlineExceeded, DeeplinkError, HandoffError, PeerGone, ProtocolError, Refused
from deeplink.kvconnector.transport import onesided, pusher, talk
from deeplink.kvconnector.transport.base import Link, Push
from deeplink.kvconnector.transport.onesided import OneSided
from deeplink.kvconnector.transport.pieces import address
from deeplink.kvconnector.wires import greeting, wire


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> Iterator[CopierTransport]:
    monkeypatch.setattr(onesided, "STOP_SECONDS", 0.2)
    made = CopierTransport()
    yield made
    made.library.landing.set()
    made.close()


@pytest.fixture
def link(transport: CopierTransport) -> Iterator[Link]:
    made = transport.connect(transport.address, soon())
    yield made
    made.close()


def bytes_of(size: int) -> memoryview:
    return memoryview(np.random.default_rng(0).bytes(size))


def hanging(transport: CopierTransport, link: Link, seconds: float = 20.0) -> tuple[bytearray, object, InThread]:
    """A push that has posted its first batch, which does not land."""
    target = bytearray(8)
    region = transport.register(memoryview(target))
    transport.library.landing.clear()
    pushes = [Push(memoryview(b"abcdefgh")[7 - i : 8 - i], region.key, i) for i in range(8)]
    push = InThread(lambda: link.push(pushes, soon(seconds)))
    eventually(lambda: transport.library.batches)
    return target, region, push


def test_a_push_is_cut_into_batches(transport: CopierTransport, link: Link) -> None:
    target, region, push = hanging(transport, link)
    transport.library.landing.set()
    push.join()
    assert [len(batch) for batch in transport.library.batches] == [4, 4]
    region.withdraw()  # type: ignore[attr-defined]
    assert target == b"hgfedcba"


def test_withdrawing_stops_a_pusher_that_hears_it(transport: CopierTransport, link: Link) -> None:
    """It waits for what is under way, and posts no more."""
    target, region, push = hanging(transport, link)
    withdrawal = InThread(region.withdraw)  # type: ignore[attr-defined]
    threading.Timer(0.1, transport.library.landing.set).start()
    withdrawal.join()
    with pytest.raises(Refused, match="withdrawn"):
        push.join()
    assert len(transport.library.batches) == 1
    assert sum(map(bool, target)) == 4


def test_what_was_posted_before_the_deadline_holds_the_memory(transport: CopierTransport, link: Link) -> None:
    """The pusher watches it after its push has failed, and then lets go. Its sources live as long."""
    target = bytearray(8)
    region = transport.register(memoryview(target))
    transport.library.landing.clear()
    source = np.frombuffer(b"abcdefgh", np.uint8).copy()
    alive = weakref.ref(source)
    with pytest.raises(DeadlineExceeded):
        link.push([Push(source.data, region.key, 0)], soon(0.2))
    link.close()
    del source
    gc.collect()
    with pytest.raises(DeadlineExceeded, match="may write there yet"):
        region.withdraw()
    assert alive() is not None
    assert transport.library.registered == 2
    transport.library.landing.set()
    eventually(lambda: _let_go(region.withdraw))
    assert target == b"abcdefgh"
    eventually(lambda: not transport.library.registered)
    eventually(lambda: alive() is None)


def _let_go(withdraw: Callable[[], None]) -> bool:
    try:
        withdraw()
    except DeadlineExceeded:
        return False
    return True


def test_closing_a_link_does_not_hide_what_it_posted(transport: CopierTransport, link: Link) -> None:
    _, region, push = hanging(transport, link)
    link.close()
    with pytest.raises(PeerGone):
        push.join()
    with pytest.raises(DeadlineExceeded):
        region.withdraw()  # type: ignore[attr-defined]
    transport.library.landing.set()
    eventually(lambda: _let_go(region.withdraw))  # type: ignore[attr-defined]


def test_a_pusher_that_is_cut_off_holds_the_memory_for_good(transport: CopierTransport) -> None:
    """And the memory is not freed under it, whoever else forgets it."""
    target = np.zeros(8, np.uint8)
    alive = weakref.ref(target)
    region = transport.register(target.data)
    sock = _talking(transport)
    talk.send(sock, talk.Begin(1, ((region.key, 0, 8),)), soon())
    go = talk.expect(sock, talk.Go, soon())
    sock.close()
    eventually(lambda: not transport._listener._open)
    for _ in range(2):
        with pytest.raises(DeadlineExceeded):
            region.withdraw()
    del target, region
    gc.collect()
    assert alive() is not None
    ctypes.memmove(go.bases[0], b"too late", 8)


@pytest.mark.parametrize("how", ["refusing", "broken"])
def test_a_library_that_fails_leaves_nothing_behind(transport: CopierTransport, link: Link, how: str) -> None:
    region = transport.register(memoryview(bytearray(8)))
    setattr(transport.library, how, "it broke")
    with pytest.raises(HandoffError, match=r"it broke|it does not write"):
        link.push([Push(bytes_of(8), region.key, 0)], soon())
    region.withdraw()
    with pytest.raises(PeerGone):  # it must be closed
        link.push([], soon())
    eventually(lambda: not transport.library.registered)


def test_one_that_never_ends_is_given_up(
    transport: CopierTransport, link: Link, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pusher, "OUTLIVE_SECONDS", 0.2)
    _, region, push = hanging(transport, link, 0.2)
    with pytest.raises(DeadlineExceeded):
        push.join()
    eventually(lambda: "has not ended" in caplog.text)
    with pytest.raises(DeadlineExceeded):
        region.withdraw()  # type: ignore[attr-defined]


def _talking(transport: CopierTransport) -> socket.socket:
    sock = wire.connect(transport.address, soon())
    greeting.greet(sock, SECRET, "transport-copier", server=False, deadline=soon())
    talk.send(sock, talk.Hello(b"a copier"), soon())
    talk.expect(sock, talk.Hello, soon())
    return sock


@pytest.mark.parametrize(
    "said",
    [
        b"\xff\xff\xff\xff",
        b"\x01\0\0\0x",
        b"\x00\0\0\0",
        b"\x40\0\0\0" + b"\x91" * 64,
        b"\x03\0\0\0\x81\xa1a",
    ],
)
def test_garbage_ends_the_connection_alone(transport: CopierTransport, link: Link, said: bytes) -> None:
    with _talking(transport) as sock:
        sock.sendall(said)
        with pytest.raises(PeerGone):
            talk.receive(sock, soon())
    link.push([], soon())


def test_a_message_out_of_turn(transport: CopierTransport) -> None:
    with _talking(transport) as sock:
        talk.send(sock, talk.Ended(), soon())
        with pytest.raises(PeerGone):
            talk.receive(sock, soon())


@pytest.mark.parametrize(
    "answer", [talk.Go((), b""), talk.Hello(b""), talk.Ended(), talk.No("not today"), talk.Go((1, 2), b"")]
)
def test_an_owner_that_makes_no_sense(transport: CopierTransport, answer: talk.Message) -> None:
    ours, theirs = socket.socketpair()
    link = pusher.OneSidedLink(ours, CopierSession(transport.library), transport._arenas, 4)
    push = InThread(lambda: link.push([Push(bytes_of(8), b"key", 0)], soon()))
    with theirs:
        assert talk.expect(theirs, talk.Begin, soon()).parts == ((b"key", 0, 8),)
        talk.send(theirs, answer, soon())
        with pytest.raises((ProtocolError, Refused)):
            push.join()
        link.close()
        assert not transport.library.batches
        if not isinstance(answer, talk.No):
            talk.expect(theirs, talk.Ended, soon())


def test_stop_before_the_first_byte(transport: CopierTransport) -> None:
    ours, theirs = socket.socketpair()
    link = pusher.OneSidedLink(ours, CopierSession(transport.library), transport._arenas, 4)
    push = InThread(lambda: link.push([Push(bytes_of(8), b"key", 0)], soon()))
    with theirs:
        talk.expect(theirs, talk.Begin, soon())
        talk.send(theirs, talk.Stop(1), soon())
        talk.send(theirs, talk.Go((4096,), b""), soon())
        talk.expect(theirs, talk.Ended, soon())
        with pytest.raises(Refused):
            push.join()
    link.close()
    assert not transport.library.batches


def test_a_stop_that_comes_too_late_is_not_for_the_next_push(transport: CopierTransport) -> None:
    ours, theirs = socket.socketpair()
    link = pusher.OneSidedLink(ours, CopierSession(transport.library), transport._arenas, 4)
    target = memoryview(bytearray(8))
    with theirs:
        for number in (1, 2):
            push = InThread(lambda: link.push([Push(bytes_of(8), b"key", 0)], soon()))
            assert talk.expect(theirs, talk.Begin, soon()).number == number
            talk.send(theirs, talk.Stop(number - 1), soon())
            talk.send(theirs, talk.Go((address(target),), b""), soon())
            talk.expect(theirs, talk.Ended, soon())
            push.join()
    link.close()
    assert target == bytes_of(8)


def test_the_library_is_closed_once(transport: CopierTransport) -> None:
    transport.close()
    transport.close()
    assert transport.library.closed == 1


def test_a_host_that_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Copier()
    with pytest.raises((OSError, DeeplinkError)):
        _ = type("Elsewhere", (OneSided,), {"name": "copier", "capabilities": CopierTransport.capabilities})(
            "192.0.2.1", SECRET, library
        )
    assert library.closed == 1
