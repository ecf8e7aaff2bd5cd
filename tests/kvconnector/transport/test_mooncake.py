"""Mooncake over TCP, which is what it does where no NIC is found."""

from __future__ import annotations

import pytest

from deeplink.testing.transport_conformance import LongTransportConformance, TransportConformance


class TestMooncake(TransportConformance):
    factory = "deeplink.kvconnector.transport.mooncake:MooncakeTransport"
    refuses = True


@pytest.mark.long
class TestMooncakeLong(LongTransportConformance):
    factory = "deeplink.kvconnector.transport.mooncake:MooncakeTransport"
