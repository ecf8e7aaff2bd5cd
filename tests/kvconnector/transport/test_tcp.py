"""What is said on the wire of the embedded transport. Everything else is in test_conformance.py."""

from __future__ import annotations

import secrets
import socket
import struct
from collections.abc import Iterator

import pytest
import xxhash
from wires import drain, eventually, soon

from deeplink.errors import Refused
from deeplink.kvconnector import wire
from deeplink.kvconnector.transport import batch
from deeplink.kvconnector.transport.base import Push
from deeplink.kvconnector.transport.tcp import PURPOSE, TcpTransport

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
    wire.greet(sock, SECRET, PURPOSE, server=False, deadline=soon())
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
