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

import time
from typing import ClassVar

import numpy as np
import pytest

from deeplink.kvconnector.transport.base import Push, Transport
from deeplink.testing.peer import Peer
from deeplink.testing.transport_arrivals import Arrivals
from deeplink.testing.transport_ends import Ends
from deeplink.testing.transport_fixtures import TransportFixtures, soon
from deeplink.testing.transport_strangers import Strangers


class TransportConformance(Arrivals, Ends, Strangers):
    """Every byte arrives and none elsewhere, a push always ends, and strangers get nowhere."""


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
