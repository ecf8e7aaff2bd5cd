"""What kvconnector relies on in a transport, as a suite to run on one's own.

    from deeplink.testing.transport_conformance import TransportConformance

    class TestMine(TransportConformance):
        factory = "my_package.transport:MyTransport"

`factory` is named by text because half of the tests run it in a second process too. The class attributes are the
sizes and times. Tests of what only an authenticated transport promises are skipped for one whose capabilities do not
claim it, unless it says that it `refuses` an honest peer's mistakes all the same. `LongTransportConformance` is used in
the same way and has what takes a gibibyte or a minute.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import pytest

from deeplink.errors import DeadlineExceeded, DeeplinkError, HandoffError, PeerGone, Refused
from deeplink.kvconnector import contract
from deeplink.kvconnector.transport.base import Link, Push, Region, Transport
from deeplink.testing.forward import forward
from deeplink.testing.peer import Peer, peer
from deeplink.testing.transport_fixtures import BLOCK, SECONDS, SECRET, Call, TransportFixtures, random_bytes, soon


class TransportConformance(TransportFixtures):
    blocks: ClassVar[int] = 4096
    large: ClassVar[int] = 64 << 20
    concurrent: ClassVar[int] = 64
    idle_seconds: ClassVar[float] = 1.0
    held_up: ClassVar[int] = 64 << 20
    """Bytes that no buffer between the two sides holds, so that a push to a frozen peer is under way for certain."""

    # -- every byte arrives ------------------------------------------------------------------------------------

    def test_many_blocks(self, transport: Transport, link: Link) -> None:
        """To scattered places, in several pushes over one link."""
        size = self.blocks * BLOCK
        source, target = random_bytes(size), bytearray(size)
        region = transport.register(memoryview(target))
        places = np.random.default_rng(0).permutation(self.blocks) * BLOCK
        view = memoryview(source)
        pushes = [Push(view[place : place + BLOCK], region.key, place) for place in places.tolist()]
        third = -(-len(pushes) // 3)
        for first in range(0, len(pushes), third):
            link.push(pushes[first : first + third], soon())
        region.withdraw()
        assert target == source

    def test_one_large(self, transport: Transport, link: Link) -> None:
        source, target = random_bytes(self.large), bytearray(self.large)
        region = transport.register(memoryview(target))
        link.push([Push(memoryview(source), region.key, 0)], soon())
        region.withdraw()
        assert target == source

    def test_odd_sizes(self, transport: Transport, link: Link) -> None:
        """Also none at all, and to the very end of a region that lies within other memory."""
        sizes = [1, 0, 7, 4095, 4097, (1 << 20) + 1, 3, (1 << 20) - 1, 0]
        source = random_bytes(sum(sizes))
        around = bytearray(sum(sizes) + 20)
        region = transport.register(memoryview(around)[10:-10])
        ends = np.cumsum(sizes).tolist()
        pushes = [
            Push(memoryview(source)[end - size : end], region.key, end - size)
            for size, end in zip(sizes, ends, strict=True)
        ]
        link.push(pushes, soon())
        link.push([], soon())
        region.withdraw()
        assert around == bytes(10) + source + bytes(10)

    def test_typed_memory(self, transport: Transport, link: Link) -> None:
        source, target = np.arange(12, dtype=np.uint32), np.zeros(12, np.uint32)
        region = transport.register(target.data)
        link.push([Push(source.data, region.key, 0)], soon())
        region.withdraw()
        np.testing.assert_array_equal(target, source)

    def test_concurrent_pushes(self, transport: Transport) -> None:
        """Each over a link of its own into a region of its own."""
        source = memoryview(random_bytes(1 << 20))
        targets = [bytearray(1 << 20) for _ in range(self.concurrent)]
        regions = [transport.register(memoryview(target)) for target in targets]

        def push(region: Region) -> None:
            link = transport.connect(transport.address, soon())
            quarter = source.nbytes // 4
            for first in range(0, source.nbytes, quarter):
                link.push([Push(source[first : first + quarter], region.key, first)], soon())
            link.close()

        calls = [Call(lambda region=region: push(region)) for region in regions]  # type: ignore[misc]
        for call in calls:
            call.result()
        for region, target in zip(regions, targets, strict=True):
            region.withdraw()
            assert target == source

    def test_after_idling(self, transport: Transport, link: Link) -> None:
        target = bytearray(4)
        region = transport.register(memoryview(target))
        link.push([Push(memoryview(b"abcd"), region.key, 0)], soon())
        time.sleep(self.idle_seconds)
        link.push([Push(memoryview(b"efgh"), region.key, 0)], soon())
        region.withdraw()
        assert target == b"efgh"

    # -- and nowhere else --------------------------------------------------------------------------------------

    @pytest.mark.parametrize("size", [10, 8 << 20])
    @pytest.mark.parametrize("fault", ["unknown key", "withdrawn key", "out of bounds", "far out of bounds"])
    def test_a_push_to_where_it_may_not(self, transport: Transport, link: Link, fault: str, size: int) -> None:
        self.checks(transport)
        around = bytearray(b"." * 300)
        region = transport.register(memoryview(around)[100:200])
        key = bytes(len(region.key)) if fault == "unknown key" else region.key
        if fault == "withdrawn key":
            region.withdraw()
        offset = (1 << 63) - 5 if fault == "far out of bounds" else 95
        with pytest.raises(Refused):
            link.push([Push(memoryview(b"x" * size), key, offset)], soon())
        region.withdraw()
        assert around == b"." * 300

    def test_a_refused_push_harms_no_other_link(self, transport: Transport, link: Link) -> None:
        target = bytearray(4)
        region = transport.register(memoryview(target))
        bad = transport.connect(transport.address, soon())
        with pytest.raises(DeeplinkError):
            bad.push([Push(memoryview(b"abcd"), region.key, 1)], soon())
        bad.close()
        link.push([Push(memoryview(b"abcd"), region.key, 0)], soon())
        region.withdraw()
        assert target == b"abcd"

    def test_no_byte_comes_after_withdraw(self, transport: Transport) -> None:
        """From whichever of several writers; their pushes fail."""
        source = memoryview(b"\xff" * (1 << 20))
        for _ in range(8):
            target = bytearray(1 << 20)
            region = transport.register(memoryview(target))
            links = [transport.connect(transport.address, soon()) for _ in range(3)]

            def storm(link: Link, key: bytes = region.key) -> None:
                while True:
                    link.push([Push(source, key, 0)], soon())

            calls = [Call(lambda link=link, storm=storm: storm(link)) for link in links]  # type: ignore[misc]
            _eventually(lambda target=target: target[0])  # type: ignore[misc]
            region.withdraw()
            target[:] = bytes(1 << 20)
            for call in calls:
                with pytest.raises((PeerGone, Refused)):
                    call.result()
            assert not any(target)
            region.withdraw()  # again does nothing
            for link in links:
                link.close()

    @pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
    def test_withdraw_from_a_peer_that_is_gone(self, transport: Transport, other: Peer, number: int) -> None:
        """Frozen or killed in the midst of pushing, it cannot hold the memory, nor write when it goes on.

        A transport that cannot be sure of that says so, and gives the memory back when the peer has let go after all.
        """
        target = bytearray(4 << 20)
        region = transport.register(memoryview(target))
        other.storm(transport.address, region.key, len(target))
        _eventually(lambda: target[0])
        other.signal(number)
        time.sleep(0.1)
        began = time.monotonic()
        certain = _withdrawn(transport, region)
        assert time.monotonic() - began < 5
        if certain:
            target[:] = bytes(len(target))
        other.signal(signal.SIGCONT)
        if not certain:
            if number == signal.SIGKILL:
                return  # nobody will ever know
            _eventually(lambda: _withdrawn(transport, region))
            target[:] = bytes(len(target))
        time.sleep(0.3)
        assert not any(target)

    # -- a push always ends ------------------------------------------------------------------------------------

    def test_a_frozen_peer_and_the_deadline(self, transport: Transport, other: Peer) -> None:
        key = other.region(self.held_up)
        source = memoryview(bytes(self.held_up))
        link = transport.connect(other.address, soon())
        link.push([Push(source[:1000], key, 5)], soon())
        other.signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            link.push([Push(source, key, 0)], soon(0.5))
        assert 0.4 < time.monotonic() - began < 5
        link.close()
        other.signal(signal.SIGCONT)
        link = transport.connect(other.address, soon())
        link.push([Push(source, key, 0)], soon())
        link.close()

    def test_connecting_to_a_frozen_peer(self, transport: Transport, other: Peer) -> None:
        other.signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(HandoffError):
            transport.connect(other.address, soon(0.5))
        assert time.monotonic() - began < 5

    def test_close_from_another_thread(self, transport: Transport, other: Peer) -> None:
        link, push = self._held_up(transport, other)
        link.close()
        with pytest.raises(PeerGone):
            push.result()
        with pytest.raises(PeerGone):
            link.push([], soon())
        link.close()

    def test_a_peer_that_is_killed(self, transport: Transport, other: Peer) -> None:
        link, push = self._held_up(transport, other)
        other.signal(signal.SIGKILL)
        with pytest.raises(PeerGone):
            push.result()
        link.close()

    @pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
    def test_a_peer_that_stops_in_the_midst(self, transport: Transport, other: Peer, number: int) -> None:
        """Of pushes that go into its memory one after the other."""
        size = 4 << 20
        link, key, source = transport.connect(other.address, soon()), other.region(size), memoryview(bytes(size))
        link.push([Push(source, key, 0)], soon())  # the first may make a fresh process load something
        pushed = threading.Event()
        deadline = soon(2)

        def storm() -> None:
            while True:
                link.push([Push(source, key, 0)], deadline)
                pushed.set()

        call = Call(storm)
        assert pushed.wait(SECONDS)
        time.sleep(0.02)
        other.signal(number)
        with pytest.raises(DeadlineExceeded if number == signal.SIGSTOP else PeerGone):
            call.result(7)
        link.close()
        if number == signal.SIGSTOP:
            other.signal(signal.SIGCONT)
            link = transport.connect(other.address, soon())
            link.push([Push(source, key, 0)], soon())
            link.close()

    def test_a_peer_that_is_restarted(self, transport: Transport, other: Peer) -> None:
        """Its links and keys are worth nothing to the next incarnation, whether or not that has the same address."""
        key = other.region(1000)
        link = transport.connect(other.address, soon())
        link.push([Push(memoryview(bytes(1000)), key, 0)], soon())
        other.end()
        with peer(self.factory, SECRET) as again:
            with pytest.raises(PeerGone):
                link.push([Push(memoryview(bytes(1000)), key, 0)], soon())
            link.close()
            if again.address != other.address:
                with pytest.raises(PeerGone):
                    transport.connect(other.address, soon())
            link = transport.connect(again.address, soon())
            link.push([Push(memoryview(bytes(1000)), again.region(1000), 0)], soon())
            if transport.capabilities.authenticated or self.refuses:
                with pytest.raises(Refused):
                    link.push([Push(memoryview(bytes(1000)), key, 0)], soon())
            link.close()

    def test_a_peer_that_is_restarted_on_the_same_address(self, transport: Transport, other: Peer) -> None:
        """As behind a service's name or a container's address: what is connected to is always the one that is there."""
        if contract.place(other.address):
            pytest.skip("the address of a transport within one host is never taken over")
        with forward(other.address) as way:
            link = transport.connect(way.address, soon())
            link.push([Push(memoryview(bytes(1000)), other.region(1000), 0)], soon())
            other.end()
            with peer(self.factory, SECRET) as again:
                way.to(again.address)
                with pytest.raises(PeerGone):
                    link.push([], soon())
                link.close()
                link = transport.connect(way.address, soon())
                link.push([Push(memoryview(bytes(1000)), again.region(1000), 0)], soon())
                link.close()

    def test_closing_the_transport_breaks_its_links(
        self, transport: Transport, start: Callable[..., Transport]
    ) -> None:
        there = start()
        region = there.register(memoryview(bytearray(4)))
        link = transport.connect(there.address, soon())
        there.close()
        with pytest.raises(PeerGone):
            link.push([Push(memoryview(b"abcd"), region.key, 0)], soon())
        with pytest.raises(PeerGone):
            transport.connect(there.address, soon())
        link.close()

    # -- strangers ---------------------------------------------------------------------------------------------

    def test_a_wrong_secret(self, transport: Transport, start: Callable[..., Transport]) -> None:
        self.checks(transport)
        stranger = start(SECRET + b"x")
        with pytest.raises(Refused):
            stranger.connect(transport.address, soon())

    @pytest.mark.parametrize(
        "garbage",
        [b"", b"\0" * 100, b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100_000],
        ids=["nothing", "zeros", "http", "much"],
    )
    def test_garbage_on_the_port(self, transport: Transport, link: Link, garbage: bytes) -> None:
        sock = self.dial(transport.address)
        if sock is None:
            pytest.skip("this transport does not listen on a socket")
        with sock:
            sock.settimeout(SECONDS)
            try:
                sock.sendall(garbage)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1 << 16):
                    pass
            except TimeoutError:
                raise AssertionError("the connection is kept") from None
            except OSError:
                pass  # it was closed before everything was said
        target = bytearray(4)
        region = transport.register(memoryview(target))
        link.push([Push(memoryview(b"abcd"), region.key, 0)], soon())
        region.withdraw()
        assert target == b"abcd"

    def _held_up(self, transport: Transport, other: Peer) -> tuple[Link, Call]:
        """A push that is under way to a frozen peer."""
        key = other.region(self.held_up)
        link = transport.connect(other.address, soon())
        link.push([], soon())
        other.signal(signal.SIGSTOP)
        push = Call(lambda: link.push([Push(memoryview(bytes(self.held_up)), key, 0)], soon(60)))
        time.sleep(0.3)
        assert push.running
        return link, push


class LongTransportConformance(TransportFixtures):
    """A minute or two, and three gibibytes of memory."""

    large: ClassVar[int] = 1 << 30
    idle_seconds: ClassVar[float] = 60.0

    @pytest.mark.timeout(300)
    def test_a_gibibyte(self, transport: Transport, other: Peer) -> None:
        """At once, into another process, and at both ends of it."""
        link = transport.connect(other.address, soon())
        key = other.region(self.large)
        source = np.random.default_rng(0).integers(0, 256, self.large, np.uint8)
        link.push([Push(source.data, key, 0)], soon(120))
        link.close()
        assert other.ask("sum 0") == str(int(source.sum()))
        assert other.ask("tail 0") == source[-16:].tobytes().hex()

    @pytest.mark.timeout(300)
    def test_after_a_minute(self, transport: Transport, other: Peer) -> None:
        link = transport.connect(other.address, soon())
        key = other.region(16)
        link.push([Push(memoryview(bytes(16)), key, 0)], soon())
        time.sleep(self.idle_seconds)
        link.push([Push(memoryview(b"0123456789abcdef"), key, 0)], soon())
        link.close()
        assert bytes.fromhex(other.ask("tail 0")) == b"0123456789abcdef"


def _withdrawn(transport: Transport, region: Region) -> bool:
    """False when a transport that is allowed to cannot say whether the peer still writes."""
    try:
        region.withdraw()
    except DeadlineExceeded:
        assert not transport.capabilities.revocable
        return False
    return True


def _eventually(condition: Callable[[], object]) -> None:
    deadline = soon()
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)
