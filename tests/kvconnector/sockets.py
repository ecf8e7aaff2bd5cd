"""Plain sockets for tests that speak to a listener without being polite."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

SECRET = b"a secret for tests only, 32 byte"
Ends = tuple[socket.socket, socket.socket]


def dial(address: str, seconds: float = 10.0) -> socket.socket:
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host, int(port)), seconds)
    sock.settimeout(seconds)
    return sock


def soon(seconds: float = 10.0) -> float:
    """A deadline in monotonic seconds."""
    return time.monotonic() + seconds


def drain(sock: socket.socket) -> bytes:
    """Everything until the peer closes; a reset counts as that."""
    data = b""
    try:
        while part := sock.recv(65536):
            data += part
    except ConnectionError:
        pass
    return data


def eventually(condition: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = soon(seconds)
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


class InThread:
    """Runs a function in a thread; `join` gives what it returned or raises what it raised."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._result: object = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(function,), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[[], object]) -> None:
        try:
            self._result = function()
        except BaseException as exc:  # noqa: BLE001 - handed to whoever joins
            self._error = exc

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def join(self, seconds: float = 20.0) -> object:
        self._thread.join(seconds)
        assert self.done, "the thread does not end"
        if self._error is not None:
            raise self._error
        return self._result
