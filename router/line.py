"""One connection to an engine: HTTP/1.1 as bytes, one request at a time.

What the engine sends goes to whoever asked as it comes, without the framing of its chunks. Nothing is read ahead of an
asker that has paused it.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import httptools

from deeplink.router.head import MAX_HEAD
from deeplink.router.headers import raw_lines, to_client
from deeplink.router.names import Names
from deeplink.router.repeated import Repeated

PIECE = 256 << 10
"""Bytes of a body that are given to the connection at a time."""
_BODILESS = (204, 304)
_LENGTH, _CODING, _TYPE = 1, 2, 3
_READ = Names({"content-length": _LENGTH, "transfer-encoding": _CODING, "content-type": _TYPE}, 0)

BEFORE = "the connection was closed before an answer came"
MIDDLE = "the connection was closed in the middle of the answer"
NOT_HTTP = "what it answered is not HTTP"
TOO_LARGE = "the head of its answer is too large"


class Owner(Protocol):
    """Who keeps connections."""

    def made(self, line: Line) -> None: ...

    def free(self, line: Line) -> None:
        """It may be asked again."""

    def lost(self, line: Line) -> None:
        """It never may. Called once for each that was made."""


class Asker(Protocol):
    """Who gets an answer. All are called from the connection's own callbacks; after `ended` nothing more comes."""

    @property
    def over(self) -> bool:
        """Whether it wants no answer any more."""

    def sent(self, line: Line) -> None:
        """The request is on its way there."""

    def began(self, heading: Heading) -> None:
        """The head is here."""

    def came(self, data: bytes) -> None:
        """More of the body; called once for all that was read at a time."""

    def ended(self, why: str = "") -> None:
        """The whole answer is here, or never will be, and why."""

    def answered(self, heading: Heading, body: bytes) -> None:
        """All of that at once."""


class Heading:
    """The head of an answer. `framed`: HTTP itself tells a complete answer from one cut short; `streams`: its body are
    server-sent events; `passed` are the lines of it that clients get. Not to be changed: it may be that of many."""

    __slots__ = ("_passed", "framed", "pairs", "status", "streams")

    def __init__(self, status: int, pairs: list[tuple[bytes, bytes]], framed: bool, streams: bool) -> None:
        self.status, self.pairs, self.framed, self.streams = status, pairs, framed, streams
        self._passed: bytes | None = None

    @property
    def passed(self) -> bytes:
        if self._passed is None:
            self._passed = raw_lines(to_client(self.pairs))
        return self._passed

    def unsized(self) -> Heading:
        """The same, of an answer of another length."""
        pairs = [pair for pair in self.pairs if _READ[pair[0]] != _LENGTH]
        return Heading(self.status, pairs, self.framed, self.streams)


class Line(asyncio.Protocol):
    """Made for its first request. Dropping a line ends the request on it: the engine sees its client leave."""

    def __init__(self, owner: Owner, asker: Asker, head: bytes, body: bytes) -> None:
        self._owner = owner
        self._first = (asker, head, body)
        self._asker: Asker | None = None
        self._heading: Heading | None = None
        self._repeated = Repeated[Heading]()
        self._parts: list[bytes] = []
        self._rest: memoryview | None = None
        self._pairs: list[tuple[bytes, bytes]] = []
        self._size = 0
        self._left = 0  # bytes of a body whose head was known
        self._fresh = b""  # a read with which an answer begins
        self._complete = self._over = self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._parser = httptools.HttpResponseParser(self)
        self._owner.made(self)
        asker, head, body = self._first
        del self._first
        if asker.over:  # nobody waits for it any more, but someone else may
            self._owner.free(self)
        else:
            self.ask(asker, head, body)

    def ask(self, asker: Asker, head: bytes, body: bytes) -> None:
        """Sends a request. The line must be free."""
        self._asker = asker
        asker.sent(self)
        self._heading = None
        self._size = 0
        self._complete = False
        if len(body) <= PIECE:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._rest = memoryview(body)
            self._push()

    def drop(self) -> None:
        """Whoever asked wants nothing more. Idempotent."""
        self._asker = self._rest = None
        self._over = True
        self._transport.abort()

    def pause(self) -> None:
        if not self._over and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if not self._over and self._paused:
            self._paused = False
            self._transport.resume_reading()

    # What the connection calls.

    def data_received(self, data: bytes) -> None:
        if (asker := self._asker) is None:  # nobody has asked for it
            self.drop()
            return
        if self._left:
            self._fill(asker, data)
            return
        if self._heading is None and not self._size:
            body = self._repeated.body(data)
            if body is not None:
                self._known(asker, self._repeated.meaning, body, self._repeated.left)
                return
            self._fresh = data
        why = ""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            why = NOT_HTTP
        self._fresh = b""
        if self._heading is None:
            self._size += len(data)
            if why or self._size > 2 * MAX_HEAD:
                self._fail(why or TOO_LARGE)
            return
        if parts := self._parts:
            asker.came(parts[0] if len(parts) == 1 else b"".join(parts))
            parts.clear()
        if self._complete:
            self._asker = None
            self._over = self._over or bool(why)
            self._ready()
            asker.ended()
        elif why:
            self._fail(why)

    def _known(self, asker: Asker, heading: Heading, body: bytes, left: int) -> None:
        """What the parser would make of a head that came before."""
        if not left:
            self._asker = None
            self._ready()
            asker.answered(heading, body)
            return
        self._heading, self._left = heading, left
        asker.began(heading)
        if body:
            asker.came(body)

    def _fill(self, asker: Asker, data: bytes) -> None:
        """Of a body whose head was known."""
        left = self._left
        self._left = max(0, left - len(data))
        asker.came(data[:left])
        if not self._left:
            self._asker = None
            self._over = self._over or len(data) > left  # more than was asked for
            self._ready()
            asker.ended()

    def connection_lost(self, exc: Exception | None) -> None:
        self._over = True
        self._rest = None
        self._owner.lost(self)
        if (asker := self._asker) is not None:
            self._asker = None
            # Without a length the end of the connection is that of the answer.
            cut = exc is not None or (self._heading is not None and self._heading.framed)
            asker.ended(BEFORE if self._heading is None else MIDDLE if cut else "")

    def resume_writing(self) -> None:
        if self._rest is not None:
            self._push()

    def _ready(self) -> None:
        """The whole answer is here: for another request, if it takes one."""
        if self._over or self._rest or self._transport.get_write_buffer_size():
            self.drop()  # it wants no other request, or has answered before it had all of this one
        else:
            if self._paused:
                self.resume()
            self._owner.free(self)

    def _push(self) -> None:
        """Gives the connection as much of the body as it takes."""
        rest = self._rest
        while rest and not self._over and self._transport.get_write_buffer_size() < PIECE:
            self._transport.write(rest[:PIECE])
            rest = rest[PIECE:]
        self._rest = rest or None

    def _fail(self, why: str) -> None:
        asker = self._asker
        self.drop()
        if asker is not None:
            asker.ended(why)

    # What the parser calls.

    def on_message_begin(self) -> None:
        if self._complete:
            self._over = True  # two answers to one request
        self._pairs = []
        self._size = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._heading is None:  # nobody reads trailers
            self._pairs.append((name, value))

    def on_headers_complete(self) -> None:
        status, (fresh, self._fresh) = self._parser.get_status_code(), (self._fresh, b"")
        if self._complete or status < 200 or self._asker is None:
            return
        framed, size, streams, pairs = status in _BODILESS, -1, False, self._pairs
        for name, value in pairs:
            if known := _READ[name]:
                if known == _TYPE:
                    streams = value.partition(b";")[0].strip().lower() == b"text/event-stream"
                elif known == _LENGTH:
                    framed, size = True, int(value)
                elif b"chunked" in value.lower():
                    framed = True
        heading = Heading(status, pairs, framed, streams)
        if fresh and status == 200 and self._repeated.remember(fresh, size):
            self._repeated.meaning = heading = heading.unsized()
        self._heading = heading
        self._asker.began(heading)

    def on_body(self, data: bytes) -> None:
        if not self._complete:
            self._parts.append(data)

    def on_message_complete(self) -> None:
        if self._heading is not None:  # else it is an interim answer, and the one that counts follows
            self._complete = True
            self._over = self._over or not self._parser.should_keep_alive()
