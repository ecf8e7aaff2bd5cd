"""What is particular to shared memory: who may be reached, what is said beside the ring, and rings that are not."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from sockets import InThread, drain, eventually, soon

from deeplink.errors import ConfigError, DeadlineExceeded, PeerGone, ProtocolError
from deeplink.kvconnector.contracts import contract
from deeplink.kvconnector.transport import shm
from deeplink.kvconnector.transport.base import Push
from deeplink.kvconnector.transport.ring import SLOT, SLOTS
from deeplink.kvconnector.transport.shm import LOANS, PURPOSE, ShmTransport
from deeplink.kvconnector.wires import greeting, wire

SECRET = b"a secret for tests only, 32 byte"
LOAN = struct.Struct("<16sQQQIQ")
COUNT = struct.Struct("<H")
PART = struct.Struct("<16sQQ")


@pytest.fixture
def transport() -> Iterator[ShmTransport]:
    made = ShmTransport("127.0.0.1", SECRET)
    eventually(lambda: not made._listener._open)  # the link to itself
    yield made
    made.close()


def raw(transport: ShmTransport) -> tuple[socket.socket, mmap.mmap]:
    """An authenticated connection on which anything can be said, and its ring."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(20)
    sock.connect("\0" + transport.address.rpartition("/")[2])
    greeting.greet(sock, SECRET, PURPOSE, server=False, deadline=soon())
    _, (descriptor,), _, _ = socket.recv_fds(sock, 1, 1)
    ring = mmap.mmap(descriptor, SLOT * SLOTS)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)
    os.close(descriptor)
    sock.sendall(b"\0")  # nothing is lent
    return sock, ring


def held() -> Counter[str]:
    """What this process has open or mapped. Whatever an earlier test left to be closed may still go away."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[os.readlink(f"/proc/self/fd/{name}")] += 1
    with open("/proc/self/maps") as maps:
        found["a mapped ring"] = maps.read().count("deeplink-ring")
    return found


def test_the_address_says_where_it_is_reached(transport: ShmTransport) -> None:
    assert contract.place(transport.address) == shm.place()
    with open("/proc/sys/kernel/random/boot_id") as file:
        assert file.read().strip() in transport.address


@pytest.mark.parametrize("address", ["local:elsewhere.1/deeplink-0", "127.0.0.1:80", ""])
def test_another_place_is_not_connected_to(transport: ShmTransport, address: str) -> None:
    with pytest.raises(PeerGone, match="not on this host"):
        transport.connect(address, soon())


def test_another_network_namespace_is_another_place() -> None:
    """As containers have: the same kernel, but neither finds the other's sockets."""
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; from deeplink.kvconnector.transport import shm; print(shm.place())"
    )
    enter = [shutil.which("unshare") or "unshare", "--user", "--net"]
    if subprocess.run([*enter, "true"], capture_output=True).returncode:
        pytest.skip("namespaces cannot be made here")
    done = subprocess.run([*enter, sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() != shm.place()
    assert done.stdout.split(".")[0] == shm.place().split(".")[0]


def test_where_rings_cannot_be_passed_it_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*arguments: object) -> None:
        raise PermissionError("no descriptors may be passed")

    before = held()
    monkeypatch.setattr(socket, "send_fds", forbidden)
    with pytest.raises(ConfigError, match="cannot be used here"):
        ShmTransport("127.0.0.1", SECRET)
    eventually(lambda: not held() - before)


def test_what_is_scribbled_into_the_ring_stays_there(transport: ShmTransport) -> None:
    target = bytearray(8)
    region = transport.register(memoryview(target))
    sock, ring = raw(transport)
    with sock:
        ring[:8] = b"a" * 8
        sock.sendall(COUNT.pack(1) + PART.pack(region.key, 0, 8))
        assert wire.receive(sock, 1, soon()) == b"\0"
        ring[:] = b"x" * len(ring)
        assert target == b"a" * 8
        region.withdraw()
        sock.sendall(COUNT.pack(1) + PART.pack(region.key, 0, 8))
        assert wire.receive(sock, 1, soon()) == b"\1"
    assert target == b"a" * 8


def test_slots_are_used_in_turn(transport: ShmTransport) -> None:
    target = bytearray(64)
    region = transport.register(memoryview(target))
    sock, ring = raw(transport)
    with sock:
        for turn in range(2 * SLOTS):
            start = turn % SLOTS * SLOT
            ring[start : start + 8] = bytes([turn + 1]) * 8
            sock.sendall(COUNT.pack(1) + PART.pack(region.key, 8 * turn, 8))
            assert wire.receive(sock, 1, soon()) == b"\0"
    assert target == b"".join(bytes([turn + 1]) * 8 for turn in range(2 * SLOTS))


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (lambda key: COUNT.pack(1) + PART.pack(key, 0, 101), b"bytes 0 to 101"),
        (lambda key: COUNT.pack(1) + PART.pack(key, 101, 0), b"bytes 101 to 101"),
        (lambda key: COUNT.pack(1) + PART.pack(key, (1 << 64) - 50, 100), b"bytes 18446744073709551566 to"),
        (lambda key: COUNT.pack(2) + PART.pack(key, 0, 10) + PART.pack(key, 95, 10), b"bytes 95 to 105"),
        (lambda key: COUNT.pack(2) + PART.pack(key, 0, 10) + PART.pack(bytes(16), 0, 1), b"no region"),
        (lambda key: COUNT.pack(1) + PART.pack(key, 0, SLOT + 1), b"bytes in a slot"),
        (lambda key: COUNT.pack(1) + PART.pack(key, 0, (1 << 64) - 1), b"bytes in a slot"),
        (lambda key: COUNT.pack(65534) + bytes(1000), b"65534 parts"),
        (
            lambda key: COUNT.pack(LOANS) + COUNT.pack(1) + LOAN.pack(key, 0, 100, 0, 0, 0),
            b"1 loans at once, at most 0",
        ),
    ],
)
def test_what_may_not_be_said(transport: ShmTransport, said: Callable[[bytes], bytes], answer: bytes) -> None:
    """Nothing of such a slot is written, not even the part that would be in order."""
    around = bytearray(b"." * 300)
    region = transport.register(memoryview(around)[100:200])
    sock, ring = raw(transport)
    ring[:] = b"x" * len(ring)
    with sock:
        sock.sendall(said(region.key))
        sock.shutdown(socket.SHUT_WR)
        told = drain(sock)
    assert told[:1] == b"\1"
    assert answer in told
    assert around == b"." * 300


def test_a_ring_goes_with_its_link(transport: ShmTransport) -> None:
    target = bytearray(100)
    region = transport.register(memoryview(target))
    before = held()
    for _ in range(20):
        link = transport.connect(transport.address, soon())
        link.push([Push(memoryview(b"x" * 100), region.key, 0)], soon())
        link.close()
    eventually(lambda: not held() - before)


def unsealed() -> int:
    descriptor = os.memfd_create("ring", os.MFD_ALLOW_SEALING)
    os.truncate(descriptor, SLOT * SLOTS)
    return descriptor


def short() -> int:
    descriptor = os.memfd_create("ring", os.MFD_ALLOW_SEALING)
    os.truncate(descriptor, 4096)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor


def file() -> int:
    return os.open("/proc/self/maps", os.O_RDONLY)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (unsealed, ProtocolError, "not sealed"),
        (short, ProtocolError, "another size"),
        (file, ProtocolError, "another size"),
        (None, ProtocolError, "no ring"),
        ("silent", DeadlineExceeded, "no ring"),
        ("gone", PeerGone, "closed"),
    ],
)
def test_a_peer_with_a_bad_ring(
    transport: ShmTransport, make: Callable[[], int] | str | None, error: type[Exception], text: str
) -> None:
    before = held()
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind("\0deeplink-test-bad-ring")
    server.listen()

    def serve() -> socket.socket:
        sock, _ = server.accept()
        greeting.greet(sock, SECRET, PURPOSE, server=True, deadline=soon())
        if callable(make):
            descriptor = make()
            socket.send_fds(sock, [b"\0"], [descriptor])
            os.close(descriptor)
        elif make is None:
            sock.sendall(b"\0")
        elif make == "gone":
            sock.close()
        return sock

    serving = InThread(serve)
    with pytest.raises(error, match=text):
        transport.connect(contract.local_address(shm.place(), "deeplink-test-bad-ring"), soon(2))
    sock = serving.join()
    assert isinstance(sock, socket.socket)
    sock.close()
    server.close()
    eventually(lambda: not held() - before)


def test_a_full_queue_is_waited_for_until_the_deadline(transport: ShmTransport) -> None:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind("\0deeplink-test-full")
    server.listen(0)
    waiting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    waiting.connect("\0deeplink-test-full")
    with pytest.raises(DeadlineExceeded):
        transport.connect(contract.local_address(shm.place(), "deeplink-test-full"), soon(0.3))
    waiting.close()
    server.close()
