"""Mooncake over TCP, which is what it does where no NIC is found, held to the suite of `deeplink.testing`."""

from __future__ import annotations

import pytest
from libraries import need

from deeplink.kvconnector.transport import mooncake
from deeplink.testing.transport_conformance import LongTransportConformance, TransportConformance

need(mooncake.load)


class TestMooncake(TransportConformance):
    factory = "deeplink.kvconnector.transport.mooncake:MooncakeTransport"
    refuses = True


@pytest.mark.long
class TestMooncakeLong(LongTransportConformance):
    factory = "deeplink.kvconnector.transport.mooncake:MooncakeTransport"
