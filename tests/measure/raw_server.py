"""A server that sends given bytes, whatever it is asked, and may hold the connection open or send on for ever."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

HOLD_SECONDS = 20.0
"""A test that waits for longer has failed; no thread outlives it by more."""
MODELS = b'{"data": [{"id": "served", "max_model_len": 4096}]}'


@dataclass(frozen=True)
class Say:
    """`data`, then `again` every `pause` seconds; with `hold` the connection stays open."""

    data: bytes = b""
    hold: bool = False
    again: bytes = b""
    pause: float = 0.02


def http(body: bytes, status: str = "200 OK", kind: str = "application/json") -> Say:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return Say(head.encode() + body)


def stream(*events: bytes, done: bool = True, hold: bool = False) -> Say:
    """Events of a stream, which ends with the connection."""
    lines = [b"data: " + event + b"\n\n" for event in events] + [b"data: [DONE]\n\n"] * done
    return Say(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + b"".join(lines), hold=hold)


@contextmanager
def saying(by_path: Mapping[str, Say]) -> Iterator[str]:
    """A server on a free port of 127.0.0.1; its URL. Requests of paths that begin so are answered so."""
    ended = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def serve() -> None:
        while not ended.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=answer, args=(connection,), daemon=True))
            threads[-1].start()

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(HOLD_SECONDS)
            request = connection.recv(1 << 16).decode(errors="replace").split(" ")
            path = request[1] if len(request) > 1 else ""
            say = next((say for prefix, say in by_path.items() if path.startswith(prefix)), Say())
            connection.sendall(say.data)
            while say.again and not ended.wait(say.pause):
                connection.sendall(say.again)
            if say.hold:
                ended.wait(HOLD_SECONDS)

    threads.append(threading.Thread(target=serve, daemon=True))
    threads[0].start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        ended.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for thread in list(threads):
            thread.join(5)
