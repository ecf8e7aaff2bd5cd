"""What the suites for transports share: transports and links that end with the test, and calls with a deadline."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pkgutil import resolve_name
from typing import ClassVar

import numpy as np
import pytest

from deeplink.errors import DeeplinkError
from deeplink.kvconnector.transport.base import Link, Transport
from deeplink.testing.peer import Peer, peer

SECRET = b"a secret for tests only, 32 byte"
BLOCK = 32 << 10
SECONDS = 30.0
"""Within which anything that is not held up ends."""


def soon(seconds: float = SECONDS) -> float:
    """A deadline in monotonic seconds."""
    return time.monotonic() + seconds


class Call:
    """A function running in a thread. `result` raises what it raised."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._function()
        except (DeeplinkError, AssertionError) as exc:
            self._error = exc

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def result(self, seconds: float = SECONDS) -> None:
        self._thread.join(seconds)
        assert not self.running, "the call does not end"
        if self._error is not None:
            raise self._error


def random_bytes(size: int) -> bytearray:
    return bytearray(np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes())


class TransportFixtures:
    """What both suites are made of."""

    factory: ClassVar[str]
    refuses: ClassVar[bool] = False

    def dial(self, address: str) -> socket.socket | None:
        """A plain connection to what listens at a transport's address; None when it is not a socket."""
        host, _, port = address.rpartition(":")
        return socket.create_connection((host, int(port)), SECONDS)

    # -- fixtures ----------------------------------------------------------------------------------------------

    @pytest.fixture
    def start(self) -> Iterator[Callable[..., Transport]]:
        """Starts transports in this process, and closes them in the end."""
        made: list[Transport] = []

        def _start(secret: bytes = SECRET) -> Transport:
            made.append(resolve_name(self.factory)("127.0.0.1", secret))
            return made[-1]

        yield _start
        for transport in made:
            transport.close()

    @pytest.fixture
    def transport(self, start: Callable[..., Transport]) -> Transport:
        return start()

    @pytest.fixture
    def link(self, transport: Transport) -> Iterator[Link]:
        made = transport.connect(transport.address, soon())
        yield made
        made.close()

    @pytest.fixture
    def other(self) -> Iterator[Peer]:
        with peer(self.factory, SECRET) as made:
            yield made

    def checks(self, transport: Transport) -> None:
        if not transport.capabilities.authenticated and not self.refuses:
            pytest.skip("this transport does not claim to check")
