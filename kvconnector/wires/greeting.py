"""What two ends of a connection say first: each proves that it knows the secret, over TLS where both have it."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import ssl
import time

from deeplink import secret as shared
from deeplink.errors import DeeplinkError, ProtocolError, Refused
from deeplink.kvconnector.wires import tls as security
from deeplink.kvconnector.wires import wire

MAGIC = b"DLK1"
_NONCE = 16
_MAC = 32
_LAST_SECONDS = 1.0


def greet(
    sock: socket.socket, secret: bytes, purpose: str, *, server: bool, deadline: float, tls: security.Tls | None = None
) -> socket.socket:
    """Agree on whether to use TLS, then mutual challenge and response: each side proves it knows the key for `purpose`.

    Returns the socket to go on with; with `tls` that is another, and `sock` is spent. Both ends send a random number,
    then the MAC of both numbers and their own role, so an answer cannot be reflected. Raises Refused when the peer's
    secret is another, or when only one side has TLS or does not accept the other's certificate; ProtocolError when
    it does not speak this.
    """
    if tls is not None:
        wire.send(sock, security.MAGIC, deadline)
        _same_security(sock, wire.receive(sock, len(MAGIC), deadline), security.MAGIC, deadline)
        sock = tls.wrap(sock, server=server, deadline=deadline)
    try:
        _prove(sock, shared.derive(secret, purpose), server=server, deadline=deadline)
    except DeeplinkError as exc:
        if tls is not None:
            sock.close()
            if isinstance(exc.__cause__, ssl.SSLError):  # only now does a client hear that its certificate is refused
                raise tls.refused(exc.__cause__) from exc
        raise
    return sock


def _prove(sock: socket.socket, key: bytes, *, server: bool, deadline: float) -> None:
    ours = secrets.token_bytes(_NONCE)
    wire.send(sock, MAGIC + ours, deadline)
    _same_security(sock, wire.receive(sock, len(MAGIC), deadline), MAGIC, deadline)
    theirs = wire.receive(sock, _NONCE, deadline)
    nonces = theirs + ours if server else ours + theirs
    roles = (b"server", b"client") if server else (b"client", b"server")
    wire.send(sock, hmac.digest(key, roles[0] + nonces, "sha256"), deadline)
    answer = wire.receive(sock, _MAC, deadline)
    if not hmac.compare_digest(answer, hmac.digest(key, roles[1] + nonces, "sha256")):
        raise Refused(
            "the peer has another secret",
            field="secret",
            ours="(not shown)",
            theirs="(not shown)",
            remedy="give all engines and the router the same secret_file",
        )


def _same_security(sock: socket.socket, theirs: bytes, ours: bytes, deadline: float) -> None:
    """Both sides say first whether they use TLS, in the clear, and neither goes on without the other."""
    if theirs == ours:
        return
    if theirs not in (MAGIC, security.MAGIC):
        raise ProtocolError("the peer does not speak deeplink's protocol", field="magic", theirs=repr(theirs))
    # What it sent on is taken, or closing would reset the connection, maybe before it has read what we said.
    with contextlib.suppress(DeeplinkError):
        wire.receive(sock, _NONCE, min(deadline, time.monotonic() + _LAST_SECONDS))
    raise Refused(
        "one side uses TLS and the other does not",
        field="kv.tls",
        ours="on" if ours == security.MAGIC else "off",
        theirs="on" if theirs == security.MAGIC else "off",
        remedy="give all engines a section [kv.tls], or none",
    )
