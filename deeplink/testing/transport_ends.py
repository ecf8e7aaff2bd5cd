"""A push always ends, whatever becomes of the peer: with its deadline, or with what has happened."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import ClassVar

import pytest

from deeplink.errors import DeadlineExceeded, HandoffError, PeerGone, Refused
from deeplink.kvconnector.contracts import contract
from deeplink.kvconnector.transport.base import Link, Push, Transport
from deeplink.testing.forward import forward
from deeplink.testing.peer import Peer, peer
from deeplink.testing.transport_fixtures import SECONDS, SECRET, Call, TransportFixtures, soon


class Ends(TransportFixtures):
    held_up: ClassVar[int] = 64 << 20
    """Bytes that no buffer between the two sides holds, so that a push to a frozen peer is under way for certain."""

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
