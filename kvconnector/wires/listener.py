"""A listening socket with one thread per authenticated connection, bounded in number."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable

from deeplink.errors import DeeplinkError
from deeplink.kvconnector.wires import greeting, wire
from deeplink.kvconnector.wires.tls import Tls

log = logging.getLogger(__name__)

GREETING_SECONDS = 5.0
MAX_CONNECTIONS = 256
RETRY_SECONDS = 0.05


class Listener:
    """Accepts on `at`, and runs ``serve(sock)`` for each peer that passes the greeting.

    `at` is a host, of which any free port is taken, or a socket that listens already and is the listener's from now
    on; `address` is ``host:port``, and empty for a socket that was given.

    `serve` owns nothing: the socket is closed when it returns or raises. A DeeplinkError from it ends that
    connection alone; it is logged, and counted by whoever raised it.
    """

    def __init__(
        self,
        at: str | socket.socket,
        secret: bytes,
        purpose: str,
        serve: Callable[[socket.socket], None],
        tls: Tls | None = None,
    ) -> None:
        self._secret = secret
        self._tls = tls
        self._purpose = purpose
        self._serve = serve
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        self.address = ""
        if isinstance(at, str):
            family = socket.AF_INET6 if ":" in at else socket.AF_INET
            self._socket = socket.create_server((at, 0), family=family, backlog=128)
            port = self._socket.getsockname()[1]
            self.address = f"[{at}]:{port}" if family is socket.AF_INET6 else f"{at}:{port}"
        else:
            self._socket = at
        threading.Thread(target=self._accept, name=f"deeplink-{purpose}", daemon=True).start()

    def close(self) -> None:
        """Stop accepting and break every connection."""
        # Only woken here: each is closed by the thread that is in it, or its descriptor could be reused under that.
        with self._lock:
            self._closed = True
            for sock in (self._socket, *self._open):
                _wake(sock)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError as exc:
                if self._closed:
                    self._socket.close()
                    return
                # A peer that has gone again, or no file descriptors left: it passes, and peers must be able to come.
                log.warning("deeplink %s: a connection could not be accepted: %s", self._purpose, exc)
                time.sleep(RETRY_SECONDS)
                continue
            if sock.family is not socket.AF_UNIX:
                wire.tune(sock)
            with self._lock:
                welcome = not self._closed and len(self._open) < MAX_CONNECTIONS
                if welcome:
                    self._open.add(sock)
            thread = threading.Thread(
                target=self._run, args=(sock,), name=f"deeplink-{self._purpose}-peer", daemon=True
            )
            try:
                if welcome:
                    thread.start()
                    continue
            except RuntimeError as exc:  # no more threads: that passes too
                log.warning("deeplink %s: a connection could not be served: %s", self._purpose, exc)
            with self._lock:
                self._open.discard(sock)
            _wake(sock)
            sock.close()

    def _run(self, sock: socket.socket) -> None:
        try:
            sock = self._greet(sock)
            self._serve(sock)
        except DeeplinkError as exc:
            log.info("deeplink %s: a connection ended: %s", self._purpose, exc)
        finally:
            with self._lock:
                self._open.discard(sock)
            _wake(sock)
            sock.close()

    def _greet(self, sock: socket.socket) -> socket.socket:
        """The socket to go on with, which is the one to be woken from then on."""
        deadline = time.monotonic() + GREETING_SECONDS
        made = greeting.greet(sock, self._secret, self._purpose, server=True, deadline=deadline, tls=self._tls)
        with self._lock:
            self._open.discard(sock)
            self._open.add(made)
            if self._closed:
                _wake(made)
        return made


def _wake(sock: socket.socket) -> None:
    """End the stream in both directions: whoever is blocked on it wakes, and the peer sees the end at once."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
