"""The embedded transport: every byte where it belongs, none anywhere else, and no push that never ends."""

from __future__ import annotations

import itertools
import secrets
import signal
import socket
import struct
import time
from collections.abc import Iterator

import numpy as np
import pytest
from processes import child
from wires import InThread, drain, eventually, soon

from deeplink.errors import DeadlineExceeded, PeerGone, Refused
from deeplink.kvconnector import wire
from deeplink.kvconnector.transport.base import Push
from deeplink.kvconnector.transport.tcp import PURPOSE, TcpTransport

SECRET = b"a secret for tests only, 32 byte"
HEADER = struct.Struct("<16sQQ")
FLUSH = HEADER.pack(bytes(16), 0, 0)

RECEIVER = """
    import sys, time
    from deeplink.kvconnector.transport.tcp import TcpTransport
    transport = TcpTransport("127.0.0.1", sys.argv[1].encode())
    region = transport.register(memoryview(bytearray(256 << 20)))
    print(transport.address, region.key.hex(), flush=True)
    time.sleep(120)
"""
SENDER = """
    import sys, time
    from deeplink.kvconnector.transport.base import Push
    from deeplink.kvconnector.transport.tcp import TcpTransport
    transport = TcpTransport("127.0.0.1", sys.argv[1].encode())
    link = transport.connect(sys.argv[2], time.monotonic() + 20)
    print("connected", flush=True)
    source = memoryview(bytearray(b"x" * (1 << 20)))
    while True:
        link.push([Push(source, bytes.fromhex(sys.argv[3]), 0)], time.monotonic() + 60)
"""


@pytest.fixture
def transport() -> Iterator[TcpTransport]:
    made = TcpTransport("127.0.0.1", SECRET)
    yield made
    made.close()


def raw(transport: TcpTransport) -> socket.socket:
    """An authenticated connection on which anything can be said."""
    sock = wire.connect(transport.address, soon())
    wire.greet(sock, SECRET, PURPOSE, server=False, deadline=soon())
    sock.settimeout(20)
    return sock


def random_bytes(size: int) -> bytearray:
    return bytearray(np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes())


def test_a_large_push(transport: TcpTransport) -> None:
    source, target = random_bytes(64 << 20), bytearray(64 << 20)
    region = transport.register(memoryview(target))
    link = transport.connect(transport.address, soon())
    link.push([Push(memoryview(source), region.key, 0)], soon(50))
    assert target == source
    link.close()


def test_many_small_ones_in_any_order(transport: TcpTransport) -> None:
    source = random_bytes(50_000)
    targets = [bytearray(25_000) for _ in range(2)]
    regions = [transport.register(memoryview(target)) for target in targets]
    link = transport.connect(transport.address, soon())
    cuts = np.unique(np.r_[0, np.random.default_rng(0).integers(0, 25_000, 300), 25_000]).tolist()
    pushes = [
        Push(memoryview(source)[base + a : base + b], regions[index].key, a)
        for index, base in enumerate((0, 25_000))
        for a, b in itertools.pairwise(cuts)
    ]
    order = np.random.default_rng(1).permutation(len(pushes))
    half = len(order) // 2
    link.push([pushes[index] for index in order[:half]], soon())
    link.push([pushes[index] for index in order[half:]], soon())  # the link is used again
    assert bytes(targets[0] + targets[1]) == source
    link.push([], soon())
    link.push([Push(memoryview(b""), regions[0].key, 25_000)], soon())
    link.close()


def test_typed_memory(transport: TcpTransport) -> None:
    source, target = np.arange(12, dtype=np.uint32), np.zeros(12, np.uint32)
    region = transport.register(memoryview(target))
    link = transport.connect(transport.address, soon())
    link.push([Push(memoryview(source), region.key, 0)], soon())
    np.testing.assert_array_equal(target, source)
    link.close()


@pytest.mark.parametrize("size", [10, 32 << 20])
@pytest.mark.parametrize("fault", ["unknown key", "withdrawn key", "out of bounds"])
def test_a_refused_push_says_why(transport: TcpTransport, fault: str, size: int) -> None:
    """Also for a push that is larger than what the sockets hold."""
    target = bytearray(b"." * 100)
    region = transport.register(memoryview(target))
    key = secrets.token_bytes(16) if fault == "unknown key" else region.key
    if fault == "withdrawn key":
        region.withdraw()
    link = transport.connect(transport.address, soon())
    text = "bytes 95 to" if fault == "out of bounds" else "no region has this key"
    with pytest.raises(Refused, match=text):
        link.push([Push(memoryview(bytearray(size)), key, 95)], soon(30))
    link.close()
    assert target == b"." * 100


@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, 101), (100, 1), (101, 0), (1 << 63, 1 << 63), ((1 << 64) - 1, 2), ((1 << 64) - 50, 100), (0, (1 << 64) - 1)],
)
def test_bounds_are_checked_without_overflow(transport: TcpTransport, offset: int, length: int) -> None:
    around = bytearray(b"." * 300)
    region = transport.register(memoryview(around)[100:200])
    with raw(transport) as sock:
        sock.sendall(HEADER.pack(region.key, offset, length) + b"x" * 64 + FLUSH)
        assert wire.receive(sock, 1, soon()) == b"\x01"
        assert f"bytes {offset} to".encode() in wire.receive(sock, wire.receive(sock, 2, soon())[0], soon())
    assert around == b"." * 300


@pytest.mark.parametrize("garbage", [b"x" * 1000, HEADER.pack(bytes(16), 0, 1) + b"x", HEADER.pack(bytes(16), 1, 0)])
def test_garbage_ends_the_connection_alone(transport: TcpTransport, garbage: bytes) -> None:
    target = bytearray(4)
    region = transport.register(memoryview(target))
    link = transport.connect(transport.address, soon())
    with raw(transport) as sock:
        sock.sendall(garbage)
        sock.shutdown(socket.SHUT_WR)
        assert drain(sock)[:1] == b"\x01"
    link.push([Push(memoryview(b"abcd"), region.key, 0)], soon())
    assert target == b"abcd"
    link.close()


def test_a_wrong_secret(transport: TcpTransport) -> None:
    other = TcpTransport("127.0.0.1", SECRET + b"x")
    with pytest.raises(Refused):
        other.connect(transport.address, soon())
    other.close()


@pytest.mark.parametrize("sent", [0, 10, 4000])
def test_withdrawn_while_it_is_written(transport: TcpTransport, sent: int) -> None:
    target = bytearray(8000)
    region = transport.register(memoryview(target))
    with raw(transport) as sock:
        sock.sendall(HEADER.pack(region.key, 0, 8000) + b"x" * sent)
        eventually(lambda: region.writers)  # type: ignore[attr-defined]
        eventually(lambda: target[:sent] == b"x" * sent)
        region.withdraw()
        assert not region.writers  # type: ignore[attr-defined]
        target[:] = b"." * 8000  # the memory has another owner now
        try:
            sock.sendall(b"x" * 4000)
            sock.sendall(b"x" * 4000)
        except ConnectionError:
            pass
        assert drain(sock) == b""
    assert target == b"." * 8000
    region.withdraw()  # again does nothing


def test_withdrawn_in_a_storm_of_writers(transport: TcpTransport) -> None:
    """No byte comes after withdraw has returned, from whichever of several writers."""
    for _ in range(10):
        target = bytearray(1 << 20)
        region = transport.register(memoryview(target))
        links = [transport.connect(transport.address, soon()) for _ in range(3)]
        source = memoryview(bytearray(b"x" * (1 << 20)))

        def storm(link=links[0], key=region.key, source=source) -> None:  # type: ignore[no-untyped-def]
            while True:
                link.push([Push(source, key, 0)], soon(30))

        writers = [InThread(lambda link=link, storm=storm: storm(link)) for link in links]  # type: ignore[misc]
        eventually(lambda target=target: target[0])  # type: ignore[misc]
        region.withdraw()
        target[:] = bytes(1 << 20)
        for writer in writers:
            with pytest.raises((PeerGone, Refused)):
                writer.join()
        assert not any(target)
        for link in links:
            link.close()


def test_close_from_another_thread_ends_a_push(transport: TcpTransport) -> None:
    silent = socket.create_server(("127.0.0.1", 0))

    def greet_and_never_read() -> socket.socket:
        sock, _ = silent.accept()
        wire.greet(sock, SECRET, PURPOSE, server=True, deadline=soon())
        return sock

    peer = InThread(greet_and_never_read)
    link = transport.connect(f"127.0.0.1:{silent.getsockname()[1]}", soon())
    sock = peer.join()
    push = InThread(lambda: link.push([Push(memoryview(bytearray(64 << 20)), bytes(16), 0)], soon(60)))
    time.sleep(0.1)
    assert not push.done
    link.close()
    with pytest.raises(PeerGone):
        push.join()
    assert isinstance(sock, socket.socket)
    sock.close()
    silent.close()


def test_closing_the_transport_breaks_its_links(transport: TcpTransport) -> None:
    other = TcpTransport("127.0.0.1", SECRET)
    region = other.register(memoryview(bytearray(4)))
    link = transport.connect(other.address, soon())
    other.close()
    with pytest.raises(PeerGone):
        link.push([Push(memoryview(b"abcd"), region.key, 0)], soon())
    with pytest.raises(PeerGone):
        transport.connect(other.address, soon())
    link.close()


def test_a_peer_that_stops_and_one_that_is_killed(transport: TcpTransport) -> None:
    with child(RECEIVER, SECRET.decode()) as peer:
        address, key = peer.line().split()
        source = memoryview(bytearray(128 << 20))
        link = transport.connect(address, soon())
        link.push([Push(source[:1000], bytes.fromhex(key), 5)], soon())

        peer.signal(signal.SIGSTOP)
        with pytest.raises(DeadlineExceeded):
            link.push([Push(source, bytes.fromhex(key), 0)], soon(0.5))
        link.close()
        peer.signal(signal.SIGCONT)

        link = transport.connect(address, soon(20))
        peer.signal(signal.SIGSTOP)  # so that the push is under way for certain when the peer dies
        push = InThread(lambda: link.push([Push(source, bytes.fromhex(key), 0)], soon(60)))
        time.sleep(0.2)
        assert not push.done
        peer.signal(signal.SIGKILL)
        with pytest.raises(PeerGone):
            push.join()
        link.close()
        with pytest.raises(PeerGone):
            transport.connect(address, soon(5))


def test_a_writer_that_is_killed_lets_go(transport: TcpTransport) -> None:
    target = bytearray(1 << 20)
    region = transport.register(memoryview(target))
    with child(SENDER, SECRET.decode(), transport.address, region.key.hex()) as peer:
        assert peer.line() == "connected"
        eventually(lambda: target[0] == ord("x"), 20)
        peer.signal(signal.SIGKILL)
        eventually(lambda: not region.writers)  # type: ignore[attr-defined]
        region.withdraw()
    eventually(lambda: not transport._listener._open)
