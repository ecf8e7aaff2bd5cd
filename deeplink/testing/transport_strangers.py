"""Who does not know the secret gets nowhere, and harms nobody."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from deeplink.errors import Refused
from deeplink.kvconnector.transport.base import Link, Push, Transport
from deeplink.testing.transport_fixtures import SECONDS, SECRET, TransportFixtures, soon


class Strangers(TransportFixtures):
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
