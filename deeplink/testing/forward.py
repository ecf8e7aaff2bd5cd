"""An address that leads to another, which may change: a peer that restarts elsewhere looks as if it came back."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

CONNECT_SECONDS = 10.0


class Forward:
    """Passes connections on, unaltered. Those that are open stay with whom they were opened to."""

    def __init__(self, address: str) -> None:
        self._target = address
        self._sockets: list[socket.socket] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def to(self, address: str) -> None:
        self._target = address

    def close(self) -> None:
        for sock in (self._listening, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                one, _ = self._listening.accept()
            except OSError:
                return
            host, _, port = self._target.rpartition(":")
            try:
                other = socket.create_connection((host, int(port)), CONNECT_SECONDS)
            except OSError:
                one.close()
                continue
            other.settimeout(None)  # a peer that is frozen is to look like one
            self._sockets += [one, other]
            for source, target in ((one, other), (other, one)):
                threading.Thread(target=_pass, args=(source, target), daemon=True).start()


def _pass(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def forward(address: str) -> Iterator[Forward]:
    made = Forward(address)
    try:
        yield made
    finally:
        made.close()
