"""Every byte of a push arrives, and nowhere else, nor after its region has been withdrawn."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import pytest

from deeplink.errors import DeadlineExceeded, DeeplinkError, PeerGone, Refused
from deeplink.kvconnector.transport.base import Link, Push, Region, Transport
from deeplink.testing.peer import Peer
from deeplink.testing.transport_fixtures import BLOCK, Call, TransportFixtures, random_bytes, soon


class Arrivals(TransportFixtures):
    """`blocks` of 32 KiB and `large` bytes are pushed, and `concurrent` links at a time."""

    blocks: ClassVar[int] = 4096
    large: ClassVar[int] = 64 << 20
    concurrent: ClassVar[int] = 64
    idle_seconds: ClassVar[float] = 1.0

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
