"""DLSlime up to the call that needs a NIC; and the same link over the library's TCP endpoint, within this process.

That endpoint is for tests alone: whoever connects to it reads and writes any address. Nor does its completion say that
the bytes have come, so they are waited for here, and the conformance suite does not apply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from libraries import need
from sockets import eventually, soon

from deeplink.errors import ConfigError, HandoffError, PeerGone, Refused
from deeplink.kvconnector.transport import dlslime
from deeplink.kvconnector.transport.base import Link, Push
from deeplink.kvconnector.transport.dlslime import DlslimeLibrary, DlslimeTransport, Endpoints, Handles
from deeplink.kvconnector.transport.onesided import OneSided

need(dlslime.load)

SECRET = b"a secret for tests only, 32 byte"
LOOPBACK = "127.0.0.1"


class TcpEndpoints(Endpoints):
    most_pieces = 31  # it marks what is done in the bits of a signed word

    def __init__(self) -> None:
        self._module = dlslime.load()

    def make(self) -> Any:
        return self._module.TcpEndpoint(LOOPBACK, 0)

    def forget(self, name: str) -> None:
        """Each endpoint has its own list, which lasts as long as it does."""


class TcpTransport(OneSided):
    name = dlslime.NAME
    capabilities = DlslimeTransport.capabilities

    def __init__(self, secret: bytes = SECRET) -> None:
        super().__init__(LOOPBACK, secret, DlslimeLibrary(TcpEndpoints()))


@pytest.fixture
def start() -> Iterator[Callable[..., TcpTransport]]:
    made: list[TcpTransport] = []

    def _start(secret: bytes = SECRET) -> TcpTransport:
        made.append(TcpTransport(secret))
        return made[-1]

    yield _start
    for transport in made:
        transport.close()


@pytest.fixture
def transport(start: Callable[..., TcpTransport]) -> TcpTransport:
    return start()


@pytest.fixture
def link(transport: TcpTransport, start: Callable[..., TcpTransport]) -> Iterator[Link]:
    made = start().connect(transport.address, soon())
    yield made
    made.close()


def test_without_a_nic_it_says_so() -> None:
    module = dlslime.load()
    if module.available_nic():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match="no RDMA device"):
        DlslimeTransport(LOOPBACK, SECRET)
    with pytest.raises(RuntimeError, match="No available RDMA devices"):
        module.RDMAEndpoint()


def test_pieces_to_scattered_places(transport: TcpTransport, link: Link) -> None:
    """More than one call takes, from and into staged memory and other."""
    source = np.random.default_rng(0).integers(0, 256, 100 * 1000, np.uint8)
    arena, other = bytearray(source.nbytes), bytearray(source.nbytes)
    transport.stage(memoryview(arena))
    places = np.random.default_rng(1).permutation(100).tolist()
    for target in (arena, other):
        region = transport.register(memoryview(target))
        link.push(
            [
                Push(memoryview(source)[index * 1000 : index * 1000 + 1000], region.key, place * 1000)
                for index, place in enumerate(places)
            ],
            soon(),
        )
        wanted = np.empty_like(source)
        wanted.reshape(100, 1000)[places] = source.reshape(100, 1000)
        eventually(lambda target=target, wanted=wanted: target == wanted.tobytes())  # type: ignore[misc]
        region.withdraw()


def test_one_large(transport: TcpTransport, link: Link) -> None:
    source = np.random.default_rng(0).integers(0, 256, (65 << 20) + 5, np.uint8)
    target = bytearray(source.nbytes)
    region = transport.register(memoryview(target))
    link.push([Push(source.data, region.key, 0)], soon())
    eventually(lambda: target == source.tobytes())
    region.withdraw()


@pytest.mark.parametrize("fault", ["unknown key", "withdrawn key", "out of bounds"])
def test_a_push_to_where_it_may_not(transport: TcpTransport, link: Link, fault: str) -> None:
    around = bytearray(b"." * 300)
    region = transport.register(memoryview(around)[100:200])
    if fault == "withdrawn key":
        region.withdraw()
    with pytest.raises(Refused):
        link.push([Push(memoryview(b"x" * 10), bytes(16) if fault == "unknown key" else region.key, 95)], soon())
    assert around == b"." * 300


def test_a_wrong_secret(transport: TcpTransport, start: Callable[..., TcpTransport]) -> None:
    with pytest.raises(Refused):
        start(SECRET + b"x").connect(transport.address, soon())


def test_a_peer_that_is_gone(transport: TcpTransport, link: Link) -> None:
    region = transport.register(memoryview(bytearray(4)))
    transport.close()
    with pytest.raises(PeerGone):
        link.push([Push(memoryview(b"abcd"), region.key, 0)], soon())


def test_memory_is_found_by_address() -> None:
    handles = Handles({7: (1000, 100), 3: (5000, 50)})
    start, length = np.array([1000, 5049, 1099], np.uint64), np.array([100, 1, 1], np.uint64)
    found, offset = handles.find(start, length)
    assert (found.tolist(), offset.tolist()) == ([7, 3, 7], [0, 49, 99])
    for bad in ([999, 1], [1099, 2], [2000, 1], [5050, 1]):
        with pytest.raises(HandoffError, match="outside"):
            handles.find(np.array(bad[:1], np.uint64), np.array(bad[1:], np.uint64))
