"""What the plain socket's bytes go into, in the other process: the mark beside what transports do."""

from __future__ import annotations

import socket
import threading
from typing import ClassVar


class Sink:
    """Takes `size` bytes and answers one, again and again: made like a transport so that `peer` runs it."""

    size: ClassVar[int]

    def __init__(self, host: str, secret: bytes) -> None:
        self._socket = socket.create_server((host, 0))
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        sock, _ = self._socket.accept()
        target = memoryview(bytearray(self.size))
        while True:
            left = target
            while left:
                count = sock.recv_into(left)
                if count == 0:
                    return
                left = left[count:]
            sock.sendall(b"\0")
