"""What is said on the wire of the embedded transport. Everything else is in test_conformance.py."""

from __future__ import annotations

import itertools
import random
import secrets
import socket
import struct
import time
from collections.abc import Iterator

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from sockets import InThread, dial, drain, eventually, soon

from deeplink.errors import Corrupted, PeerGone, ProtocolError, Refused
from deeplink.kvconnector.transport import batch
from deeplink.kvconnector.transport import tcp as module
from deeplink.kvconnector.transport.base import Push
from deeplink.kvconnector.transport.tcp import PURPOSE, TcpLink, TcpTransport
from deeplink.kvconnector.wires import greeting, wire
from deeplink.kvconnector.wires import listener as listening

SECRET = b"a secret for tests only, 32 byte"
SUM = struct.Struct("<Q")


@pytest.fixture
def transport() -> Iterator[TcpTransport]:
    made = TcpTransport("127.0.0.1", SECRET)
    yield made
    made.close()


def head(*parts: tuple[bytes, int, int], count: int | None = None) -> bytes:
    """What announces `parts`, or says that there were `count` of them; without any it asks for an answer."""
    packed = b"".join(batch.PART.pack(*part) for part in parts)
    count = len(parts) if count is None else count
    return batch.HEAD.pack(count, xxhash.xxh3_64_intdigest(struct.pack("<H", count) + packed)) + packed


def checksum(data: bytes) -> bytes:
    return SUM.pack(xxhash.xxh3_64_intdigest(data))


def raw(transport: TcpTransport) -> socket.socket:
    """An authenticated connection on which anything can be said."""
    sock = wire.connect(transport.address, soon())
    greeting.greet(sock, SECRET, PURPOSE, server=False, deadline=soon())
    sock.settimeout(20)
    return sock


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
        sock.sendall(head((region.key, offset, length)) + b"x" * 64 + head())
        assert wire.receive(sock, 1, soon()) == b"\x01"
        assert f"bytes {offset} to".encode() in wire.receive(sock, wire.receive(sock, 2, soon())[0], soon())
    assert around == b"." * 300


@pytest.mark.parametrize(
    "garbage",
    [b"x" * 1000, head((bytes(16), 0, 1)) + b"x", head((bytes(16), 1, 0)), head(count=513), head(count=65535)],
)
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


@pytest.mark.parametrize("sent", [0, 10, 4000])
def test_withdrawn_while_it_is_written(transport: TcpTransport, sent: int) -> None:
    target = bytearray(8000)
    region = transport.register(memoryview(target))
    with raw(transport) as sock:
        sock.sendall(head((region.key, 0, 8000)) + b"x" * sent)
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


class Relay:
    """A connection to `address` by way of this, which changes the byte at `place` of what is sent there."""

    def __init__(self, address: str, place: int, bit: int = 1) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._there = dial(address, 30)
        self._place, self._bit = place, bit
        self._threads = [InThread(self._forth), InThread(self._back)]

    def _forth(self) -> None:
        self._here = self._server.accept()[0]
        passed = 0
        while data := bytearray(_some(self._here)):
            if 0 <= self._place - passed < len(data):
                data[self._place - passed] ^= self._bit
            passed += len(data)
            self._there.sendall(data)
        self._there.shutdown(socket.SHUT_WR)

    def _back(self) -> None:
        eventually(lambda: hasattr(self, "_here"))
        while data := _some(self._there):
            self._here.sendall(data)

    def close(self) -> None:
        for thread in self._threads:
            thread.join()
        for sock in (self._server, self._here, self._there):
            sock.close()


def _some(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1 << 16)
    except OSError:
        return b""


GREETING = len(greeting.MAGIC) + 16 + 32
HEAD_SIZE = batch.HEAD.size + 2 * batch.PART.size


@pytest.mark.parametrize(
    ("place", "bit"),
    [
        (0, 1),  # the count
        (1, 128),
        (2, 4),  # its checksum
        (batch.HEAD.size, 1),  # a key
        (batch.HEAD.size + 16, 1),  # an offset
        (batch.HEAD.size + 24, 1),  # a length
        (HEAD_SIZE, 1),  # the first byte
        (HEAD_SIZE + 700_000, 128),
        (HEAD_SIZE + 999_999, 2),
        (HEAD_SIZE + 1_000_000, 1),  # the checksum of the bytes
    ],
)
def test_what_was_changed_on_its_way_is_never_acknowledged(transport: TcpTransport, place: int, bit: int) -> None:
    source, target = secrets.token_bytes(1_000_000), bytearray(1_000_000)
    region = transport.register(memoryview(target))
    relay = Relay(transport.address, GREETING + place, bit)
    link = transport.connect(relay.address, soon())
    # Two parts: what goes to adjacent places, in order, would be one.
    halves = [Push(memoryview(source)[start : start + 500_000], region.key, start) for start in (500_000, 0)]
    began = time.monotonic()
    with pytest.raises((Corrupted, Refused)) as caught:
        link.push(halves, soon(5))
    assert time.monotonic() - began < 4
    if isinstance(caught.value, Corrupted):
        assert caught.value.field == "checksum"
        assert len(caught.value.ours) == len(caught.value.theirs) == 16
        assert caught.value.ours != caught.value.theirs
    else:
        assert "parts at once" in caught.value.message
    if place < HEAD_SIZE:
        assert not any(target)  # nothing is written on the word of parts that were changed
    link.close()
    relay.close()
    link = transport.connect(transport.address, soon())  # what is not changed still comes
    link.push(halves, soon())
    assert target == source
    link.close()


def test_a_changed_request_for_an_answer_is_not_answered(transport: TcpTransport) -> None:
    for spoilt in (head(count=0)[:9] + b"x", b"\0" * batch.HEAD.size):
        with raw(transport) as sock:
            sock.sendall(spoilt)
            sock.shutdown(socket.SHUT_WR)
            assert drain(sock)[:1] == b"\2"


def test_the_checksum_of_the_bytes_alone(transport: TcpTransport) -> None:
    target = bytearray(8)
    region = transport.register(memoryview(target))
    with raw(transport) as sock:
        sock.sendall(head((region.key, 0, 8)) + b"abcdefgh" + checksum(b"abcdefgh") + head())
        assert wire.receive(sock, 1, soon()) == b"\0"
        sock.sendall(head((region.key, 0, 8)) + b"abcdefgX" + checksum(b"abcdefgh") + head())
        status, sent, came = struct.unpack("<cQQ", wire.receive(sock, 17, soon()))
        assert status == b"\2"
        assert (SUM.pack(sent), SUM.pack(came)) == (checksum(b"abcdefgh"), checksum(b"abcdefgX"))


@pytest.mark.parametrize("said", [b"\x03", b"\xff", b"\x02" + bytes(5), b"\x01\xff\xffx"])
def test_an_answer_that_makes_no_sense(said: bytes) -> None:
    """Also before anything was asked for."""
    ours, theirs = socket.socketpair()
    link = TcpLink([ours])
    theirs.sendall(said)
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises((ProtocolError, PeerGone)):
        link.push([Push(memoryview(b"x" * 100), bytes(16), 0)], soon(2))
    link.close()
    theirs.close()


def test_acknowledged_before_it_was_asked() -> None:
    ours, theirs = socket.socketpair()
    link = TcpLink([ours])
    theirs.sendall(b"\0")
    with pytest.raises(ProtocolError, match="not asked"):
        link.push([Push(memoryview(b"x" * 100), bytes(16), 0)], soon(2))
    link.close()
    theirs.close()


@pytest.mark.parametrize("seed", range(30))
def test_random_bytes_end_the_connection_alone(transport: TcpTransport, seed: int) -> None:
    """Some of them begin as they should."""
    chance = random.Random(seed)
    target = bytearray(b"." * 1000)
    region = transport.register(memoryview(target))
    good = head((region.key, 0, 10), (region.key, 990, 10)) + b"x" * 20 + checksum(b"x" * 20) + head()
    data = bytearray(good + chance.randbytes(200))
    for _ in range(chance.randrange(1, 4)):
        data[chance.randrange(len(good))] ^= 1 << chance.randrange(8)
    with raw(transport) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        assert not drain(sock).startswith(b"\0")
    assert target[10:990] == b"." * 980
    link = transport.connect(transport.address, soon())
    link.push([Push(memoryview(b"y" * 1000), region.key, 0)], soon())
    assert target == b"y" * 1000
    link.close()


@given(
    sizes=st.lists(st.one_of(st.integers(0, 40), st.integers(0, 700_000)), max_size=30),
    size=st.sampled_from([7, 1 << 16, 1 << 20]),
)
@settings(deadline=None, max_examples=50)
def test_batches_are_the_same_bytes_in_the_same_places(sizes: list[int], size: int) -> None:
    if size == 7:
        sizes = [min(one, 40) for one in sizes]
    data = memoryview(random.Random(0).randbytes(sum(sizes)))
    ends = list(itertools.accumulate(sizes))
    pushes = [
        Push(data[end - one : end], index.to_bytes(16, "little"), index * 1000)
        for index, (one, end) in enumerate(zip(sizes, ends, strict=True))
    ]
    made = list(batch.cut(pushes, size))
    assert all(0 < len(one) <= batch.MAX_PARTS for one in made)
    assert all(sum(push.source.nbytes for push in one) <= size for one in made)
    found: dict[bytes, bytearray] = {push.key: bytearray() for push in pushes}
    for push in itertools.chain.from_iterable(made):
        index = int.from_bytes(push.key, "little")
        assert push.offset == index * 1000 + len(found[push.key])
        found[push.key] += push.source
    assert list(found.values()) == [push.source for push in pushes]
    assert {push.key for one in made for push in one} == set(found)  # empty ones are checked there too
    for one in made:
        cut = list(batch.windows(push.source for push in one))
        assert all(0 < sum(view.nbytes for view in window) <= batch.WINDOW for window in cut)
        assert b"".join(itertools.chain.from_iterable(cut)) == b"".join(push.source for push in one)
        count, checksum = batch.HEAD.unpack(batch.pack(one)[: batch.HEAD.size])
        parts = batch.pack(one)[batch.HEAD.size :]
        assert (count, checksum) == (len(one), batch.head_sum(count, parts))
        assert batch.unpack(parts) == [(push.key, push.offset, push.source.nbytes) for push in one]


def test_what_goes_to_adjacent_places_is_one_part() -> None:
    data = memoryview(bytes(100))
    lengths = [(b"a" * 16, 0, 10), (b"a" * 16, 10, 20), (b"b" * 16, 30, 5), (b"b" * 16, 0, 30), (b"b" * 16, 30, 7)]
    packed = batch.pack([Push(data[:length], key, offset) for key, offset, length in lengths])
    assert batch.HEAD.unpack(packed[: batch.HEAD.size])[0] == 3
    assert batch.unpack(packed[batch.HEAD.size :]) == [
        (b"a" * 16, 0, 30),
        (b"b" * 16, 30, 5),
        (b"b" * 16, 0, 37),
    ]


@pytest.mark.parametrize("streams", [2, 5])
def test_a_push_over_several_streams(transport: TcpTransport, streams: int) -> None:
    """A small one needs no more than one of them."""
    here = TcpTransport("127.0.0.1", SECRET, streams=streams)
    source, target = secrets.token_bytes(20_000_000), bytearray(20_000_000)
    region = transport.register(memoryview(target))
    link = here.connect(transport.address, soon())
    eventually(lambda: len(transport._listener._open) == streams)
    view = memoryview(source)
    link.push(
        [Push(view[start : start + 300_000], region.key, start) for start in range(0, 19_000_000, 300_000)], soon()
    )
    link.push([Push(view[19_000_000:], region.key, 19_000_000)], soon())
    assert target == source
    link.close()
    eventually(lambda: not transport._listener._open)
    here.close()


def test_a_fault_in_one_stream_breaks_the_link(transport: TcpTransport) -> None:
    here = TcpTransport("127.0.0.1", SECRET, streams=3)
    target = bytearray(8 << 20)
    region, other = transport.register(memoryview(target)), transport.register(memoryview(bytearray(8 << 20)))
    link = here.connect(transport.address, soon())
    pushes = [Push(memoryview(bytes(8 << 20)), key, 0) for key in (region.key, bytes(16), other.key)]
    with pytest.raises((Refused, PeerGone)):
        link.push(pushes, soon())
    with pytest.raises(PeerGone):
        link.push(pushes[:1], soon())
    link.close()
    here.close()


def test_streams_that_cannot_all_be_opened(transport: TcpTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "MAX_CONNECTIONS", 2)
    here = TcpTransport("127.0.0.1", SECRET, streams=3)
    with pytest.raises(PeerGone):
        here.connect(transport.address, soon())
    eventually(lambda: not transport._listener._open)
    here.close()


def test_how_many_streams_by_default(transport: TcpTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    """One to this host; to another by how the kernel paces."""
    link = transport.connect(transport.address, soon())
    assert len(link._streams) == 1
    link.close()
    with socket.create_server(("127.0.0.2", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        for name, count in ((b"reno", module.STREAMS), (b"bbr", 1)):
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            except OSError:
                continue  # not in this kernel
            assert module._default(sock) == count
        monkeypatch.delattr(socket, "TCP_CONGESTION", raising=False)
        assert module._default(sock) == module.STREAMS


def test_a_post_ahead(transport: TcpTransport) -> None:
    """The answers come in the order of the posts; a refusal is told to whoever waits for it."""
    here = TcpTransport("127.0.0.1", SECRET, streams=2)
    source, target = secrets.token_bytes(6_000_000), bytearray(6_000_000)
    region = transport.register(memoryview(target))
    link = here.connect(transport.address, soon())
    view = memoryview(source)
    waits = [link.post([Push(view[i : i + 3_000_000], region.key, i)], soon()) for i in (0, 3_000_000)]
    waits.append(link.post([Push(view[:10], region.key, 0)], soon()))
    for wait in waits:
        wait(soon())
    assert target == source
    with pytest.raises(Refused):
        link.post([Push(view[:10], bytes(16), 0)], soon())(soon())
    link.close()
    here.close()
