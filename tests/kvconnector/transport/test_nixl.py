"""NIXL over whatever UCX finds here, held to the suite of `deeplink.testing`: within one host it copies from process to
process."""

from __future__ import annotations

import msgspec
import pytest
from libraries import need

from deeplink.errors import ProtocolError
from deeplink.kvconnector.transport import nixl
from deeplink.testing.transport_conformance import LongTransportConformance, TransportConformance

need(nixl.load)


def test_what_a_peer_says_of_its_agent() -> None:
    said = nixl.described(msgspec.msgpack.encode({"name": "theirs", "metadata": b"\x00\xff"}))
    assert (said.name, said.metadata) == ("theirs", b"\x00\xff")


@pytest.mark.parametrize("theirs", [b"", b"\xc1", b"\x91" * 5000, msgspec.msgpack.encode({"name": 1, "metadata": b""})])
def test_what_describes_no_agent_is_refused(theirs: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a description of a NIXL agent"):
        nixl.described(theirs)


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
