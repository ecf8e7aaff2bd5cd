"""NIXL over whatever UCX finds here, held to the suite of `deeplink.testing`: within one host it copies from process to
process."""

from __future__ import annotations

import pytest
from libraries import need

from deeplink.kvconnector.transport import nixl
from deeplink.testing.transport_conformance import LongTransportConformance, TransportConformance

need(nixl.load)


class TestNixl(TransportConformance):
    factory = "deeplink.kvconnector.transport.nixl:NixlTransport"
    refuses = True


class TestNixlOverTcp(TestNixl):
    """As across hosts that have no better."""

    @pytest.fixture(autouse=True)
    def tcp(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UCX_TLS", "tcp,self")


@pytest.mark.long
class TestNixlLong(LongTransportConformance):
    factory = "deeplink.kvconnector.transport.nixl:NixlTransport"
