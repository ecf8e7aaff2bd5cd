"""TLS on a connection between two engines: both show a certificate, and each accepts what its CA has signed.

The CA is one for the engines of a deployment. A name in a certificate is not compared with an address: whoever holds a
certificate of this CA and the secret is a peer, wherever it runs.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeplink.errors import ConfigError, DeadlineExceeded, DeeplinkError, PeerGone, Refused

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from deeplink.config import TlsSection

MAGIC = b"DLKS"
"""Sent in the clear by a side that uses TLS, in place of the greeting's own."""
LAST_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Tls:
    """What one process needs to speak TLS with its peers; made once by `load`, used for every connection."""

    certificate: Path
    ca: Path
    _server: ssl.SSLContext
    _client: ssl.SSLContext

    @classmethod
    def of(cls, section: TlsSection | None) -> Tls | None:
        """What the configuration says; None without such a section."""
        return None if section is None else cls.load(section.certificate, section.key, section.ca)

    @classmethod
    def load(cls, certificate: Path, key: Path, ca: Path) -> Tls:
        """Read the three PEM files. Raises ConfigError naming the setting that is wrong."""
        server, client = (ssl.SSLContext(kind) for kind in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT))
        for context in (server, client):
            context.check_hostname = False
            context.verify_mode = ssl.CERT_REQUIRED
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.sslsocket_class = TlsSocket
            for field, path in (("certificate", certificate), ("key", key), ("ca", ca)):
                _readable(field, path)
            try:
                context.load_cert_chain(certificate, key, password=_no_password)
            except (ssl.SSLError, ConfigError) as exc:
                raise ConfigError(
                    f"{certificate} and {key} are not a certificate and its unencrypted key: {exc}",
                    field="kv.tls.certificate",
                    ours=str(certificate),
                ) from exc
            try:
                context.load_verify_locations(ca)
            except ssl.SSLError as exc:
                raise ConfigError(f"{ca} has no certificate: {exc}", field="kv.tls.ca", ours=str(ca)) from exc
        server.num_tickets = 0  # or a client would find its connection readable with nothing to read
        return cls(certificate, ca, server, client)

    def wrap(self, sock: socket.socket, *, server: bool, deadline: float) -> TlsSocket:
        """The handshake; `sock` is spent, whatever comes of it. Raises Refused, PeerGone or DeadlineExceeded."""
        context = self._server if server else self._client
        try:
            made = context.wrap_socket(sock, server_side=server, do_handshake_on_connect=False)
        except (OSError, ValueError) as exc:
            sock.close()
            raise PeerGone(f"the connection broke before the TLS handshake: {exc}") from exc
        assert isinstance(made, TlsSocket)
        try:
            made.shake_hands(deadline)
        except ssl.SSLCertVerificationError as exc:
            made.linger(deadline)
            raise Refused(
                f"the peer's certificate is not accepted: {exc.verify_message}",
                field="kv.tls.ca",
                ours=str(self.ca),
                theirs="a certificate it did not sign, or that is not valid now",
                remedy="give every engine a certificate of one CA, and that CA's file",
            ) from exc
        except ssl.SSLError as exc:
            made.linger(deadline)
            raise self.refused(exc) from exc
        except (OSError, ValueError) as exc:
            made.close()
            raise PeerGone(f"the connection broke in the TLS handshake: {exc}") from exc
        except DeeplinkError:
            made.close()
            raise
        return made

    def refused(self, problem: ssl.SSLError) -> Refused:
        """The error for what the peer's TLS did not like about ours."""
        return Refused(
            "the peer does not accept this engine's TLS",
            field="kv.tls.certificate",
            ours=str(self.certificate),
            theirs=str(problem.reason or problem),
            remedy="give every engine a certificate of one CA, and that CA's file",
        )


class TlsSocket(ssl.SSLSocket):
    """A TLS connection that one thread may read while another writes, which OpenSSL does not allow by itself.

    No call waits: each raises SSLWantReadError or SSLWantWriteError instead, as a plain socket does BlockingIOError
    when it is called with MSG_DONTWAIT. Flags are ignored.
    """

    _turn: threading.Lock

    def shake_hands(self, deadline: float) -> None:
        """Before any other call."""
        self._turn = threading.Lock()
        self.setblocking(False)
        while True:
            try:
                self.do_handshake()
                return
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN, deadline)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT, deadline)

    def linger(self, deadline: float) -> None:
        """Close, once the peer has read why and leaves: what it sent would otherwise reset the connection before."""
        deadline = min(deadline, time.monotonic() + LAST_SECONDS)
        try:
            socket.socket.shutdown(self, socket.SHUT_WR)
            while True:
                self._wait(select.POLLIN, deadline)
                if not socket.socket.recv(self, 1 << 16):
                    return
        except (OSError, DeadlineExceeded):
            pass
        finally:
            self.close()

    def send(self, data: Buffer, flags: int = 0) -> int:
        with self._turn:
            return super().send(data)

    def recv_into(self, buffer: Buffer, nbytes: int | None = None, flags: int = 0) -> int:
        with self._turn:
            return super().recv_into(buffer, nbytes)

    def sendmsg(self, buffers: Iterable[Buffer], *arguments: Any) -> int:  # type: ignore[override]
        """Takes of the first buffer only."""
        first = next(iter(buffers))
        return self.send(first) if memoryview(first).nbytes else 0

    def recvmsg_into(self, buffers: Iterable[Buffer], *arguments: Any) -> Any:  # type: ignore[override]
        """Fills of the first buffer only."""
        return self.recv_into(next(iter(buffers))), [], 0, None

    def shutdown(self, how: int) -> None:
        # The base class forgets here that this is TLS: a thread that reads would take what is encrypted for data.
        socket.socket.shutdown(self, how)

    def _wait(self, event: int, deadline: float) -> None:
        seconds = deadline - time.monotonic()
        poll = select.poll()
        poll.register(self, event)
        if seconds <= 0 or not poll.poll(seconds * 1000):
            raise DeadlineExceeded("the peer does not answer in the TLS handshake")


def _readable(field: str, path: Path) -> None:
    try:
        path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror}", field=f"kv.tls.{field}", ours=str(path)) from exc


def _no_password() -> str:
    # Without this OpenSSL would ask on the terminal.
    raise ConfigError("the key is encrypted")
