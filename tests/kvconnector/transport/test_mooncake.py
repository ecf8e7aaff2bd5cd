"""Mooncake over TCP, which is what it does where no NIC is found, held to the suite of `deeplink.testing`."""

from __future__ import annotations

import pytest
from libraries import need

from deeplink.kvconnector.transport import mooncake
from deeplink.testing.transport_conformance import LongTransportConformance, TransportConformance

need(mooncake.load)


def test_peers_are_told_where_the_engine_listens() -> None:
    """Of two engines in one process each has an address of its own."""
    libraries = [mooncake.MooncakeLibrary("127.0.0.1") for _ in range(2)]
    try:
        told = [library.session(serving=True).describe().decode() for library in libraries]
        assert [address.rpartition(":")[0] for address in told] == ["127.0.0.1"] * 2
        assert len(set(told)) == 2
    finally:
        for library in libraries:
            library.close()


class TestMooncake(TransportConformance):
    factory = "deeplink.kvconnector.transport.mooncake:MooncakeTransport"
    refuses = True


@pytest.mark.long
class TestMooncakeLong(LongTransportConformance):
    factory = "deeplink.kvconnector.transport.mooncake:MooncakeTransport"
