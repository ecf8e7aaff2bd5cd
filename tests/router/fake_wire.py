"""A connection without a network: what is written to it is kept, and bytes are given to its protocol by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from deeplink.errors import DeeplinkError
from deeplink.router.client import Client
from deeplink.router.head import Head
from deeplink.router.line import Heading, Line


class Wire(asyncio.Transport):
    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.protocol = protocol
        self.written = bytearray()
        self.paused = self.ended = self.closed = False
        protocol.connection_made(self)

    def write(self, data: Any) -> None:
        assert not self.ended
        if not self.closed:
            self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def pause_reading(self) -> None:
        assert not self.paused, "a transport may not be paused twice"
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.protocol.connection_lost(None)

    abort = close

    def is_closing(self) -> bool:
        return self.closed


class Echo:
    """Answers each request with its body; later, if it is told so. A body may have `most` bytes."""

    def __init__(self, later: Callable[[Callable[[], None]], Any] | None = None, most: int = 1 << 20) -> None:
        self.later = later
        self.most = most
        self.requests: list[tuple[Head, bytes]] = []
        self.refusals: list[DeeplinkError] = []
        self.cancelled = 0

    def limit(self, head: Head) -> int:
        return self.most

    def start(self, head: Head, body: bytes, client: Client) -> None:
        self.requests.append((head, body))

        def answer() -> None:
            client.answer(200, b"", body)
            client.done()

        if self.later is None:
            answer()
        else:
            client.runs(self)
            self.later(answer)

    def cancel(self) -> None:
        self.cancelled += 1

    def refused(self, head: Head | None, error: DeeplinkError) -> tuple[int, bytes, bytes]:
        self.refusals.append(error)
        return error.status, b"", b""


class Pool:
    """Keeps lines to engines: all that there are, and those that were free."""

    def __init__(self) -> None:
        self.lines: set[Line] = set()
        self.idle: list[Line] = []

    def made(self, line: Line) -> None:
        self.lines.add(line)

    def free(self, line: Line) -> None:
        self.idle.append(line)

    def lost(self, line: Line) -> None:
        self.lines.remove(line)


class Asker:
    """Has asked an engine; `whys` is how that ended, each time it did."""

    def __init__(self) -> None:
        self.over = False
        self.status, self.framed, self.data = 0, False, b""
        self.heading: Heading | None = None
        self.whys: list[str] = []

    def sent(self, line: Line) -> None:
        assert not self.over

    def began(self, heading: Heading) -> None:
        assert not self.status
        self.heading = heading
        self.status, self.framed = heading.status, heading.framed

    def came(self, data: bytes) -> None:
        assert data
        assert self.status
        assert not self.whys
        self.data += data

    def ended(self, why: str = "") -> None:
        self.whys.append(why)

    def answered(self, heading: Heading, body: bytes) -> None:
        self.began(heading)
        if body:
            self.came(body)
        self.ended()
