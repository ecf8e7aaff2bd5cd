"""Who knows the secret is let in, and nobody else, whatever he says or has heard; with TLS in test_tls."""

from __future__ import annotations

import socket

import pytest
from sockets import SECRET, Ends, InThread, soon

from deeplink.errors import PeerGone, ProtocolError, Refused
from deeplink.kvconnector.wires import greeting, wire


def greeted(sock: socket.socket, *, server: bool, secret: bytes = SECRET, purpose: str = "test") -> InThread:
    return InThread(lambda: greeting.greet(sock, secret, purpose, server=server, deadline=soon()))


def test_one_secret(ends: Ends) -> None:
    client, server = greeted(ends[0], server=False), greeted(ends[1], server=True)
    client.join()
    server.join()
    wire.send(ends[0], b"the stream begins here", soon())
    assert wire.receive(ends[1], 22, soon()) == b"the stream begins here"


@pytest.mark.parametrize("other", [{"secret": SECRET + b"x"}, {"purpose": "other"}])
def test_both_sides_refuse_another_secret_or_purpose(ends: Ends, other: dict[str, object]) -> None:
    client = greeted(ends[0], server=False)
    server = greeted(ends[1], server=True, **other)  # type: ignore[arg-type]
    for side in (client, server):
        with pytest.raises(Refused) as caught:
            side.join()
        assert caught.value.field == "secret"
        assert "secret_file" in caught.value.remedy
        assert "a secret for tests" not in str(caught.value)


@pytest.mark.parametrize("server", [True, False])
def test_a_reflected_greeting_is_refused(ends: Ends, server: bool) -> None:
    side = greeted(ends[0], server=server)
    # Whatever it says is said back to it.
    for length in (20, 32):
        ends[1].sendall(wire.receive(ends[1], length, soon()))
    with pytest.raises(Refused):
        side.join()


def test_two_of_one_kind_refuse_each_other(ends: Ends) -> None:
    sides = [greeted(end, server=True) for end in ends]
    for side in sides:
        with pytest.raises(Refused):
            side.join()


def test_a_recorded_greeting_is_refused(ends: Ends) -> None:
    """What one client said is worth nothing to the next: the server's number is another."""
    a, b = socket.socketpair()
    client, server = greeted(a, server=False), greeted(ends[1], server=True)
    said = wire.receive(b, 20, soon())
    ends[0].sendall(said)
    b.sendall(wire.receive(ends[0], 20, soon()))
    proof = wire.receive(b, 32, soon())
    ends[0].sendall(proof)
    b.sendall(wire.receive(ends[0], 32, soon()))
    client.join()
    server.join()
    c, d = socket.socketpair()
    again = greeted(d, server=True)
    c.sendall(said + proof)
    with pytest.raises(Refused):
        again.join()
    for sock in (a, b, c, d):
        sock.close()


def test_something_else_is_not_deeplink(ends: Ends) -> None:
    side = greeted(ends[0], server=True)
    ends[1].sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    with pytest.raises(ProtocolError) as caught:
        side.join()
    assert caught.value.theirs == repr(b"GET ")


def test_a_greeting_cut_off(ends: Ends) -> None:
    side = greeted(ends[0], server=True)
    ends[1].sendall(greeting.MAGIC + b"short")
    ends[1].close()
    with pytest.raises(PeerGone):
        side.join()
