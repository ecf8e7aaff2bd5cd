"""The built-in transports are held to the suite that others are held to: what it asserts is in `deeplink.testing`, by
what is asked of a transport (`transport_arrivals`, `transport_ends`, `transport_strangers`)."""

from __future__ import annotations

import socket

import pytest

from deeplink.testing.transport_conformance import LongTransportConformance, TransportConformance
from deeplink.testing.transport_fixtures import SECONDS


class TestTcp(TransportConformance):
    factory = "deeplink.kvconnector.transport.tcp:TcpTransport"


class TestShm(TransportConformance):
    factory = "deeplink.kvconnector.transport.shm:ShmTransport"

    def dial(self, address: str) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(SECONDS)
        sock.connect("\0" + address.rpartition("/")[2])
        return sock


@pytest.mark.long
class TestTcpLong(LongTransportConformance):
    factory = "deeplink.kvconnector.transport.tcp:TcpTransport"


@pytest.mark.long
class TestShmLong(LongTransportConformance):
    factory = "deeplink.kvconnector.transport.shm:ShmTransport"
