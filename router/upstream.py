"""Calls to an engine's API. Whatever carries the bytes is behind `Upstream`; the flow sees only what is
here."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Collection, Sequence
from urllib.parse import urlsplit

from deeplink.router.headers import lines, texts
from deeplink.router.line import Line

CONNECT_SECONDS = 2.0
# Below the 5 s after which the engines' HTTP server closes an idle connection: of the two ends only the one
# that would send next can do it without losing a request.
KEEP_SECONDS = 2.0
AHEAD = 1 << 18
"""Bytes of an answer that are read before anyone wants them."""


class Lost(Exception):
    """The connection broke, or the answer was not one. The engine may have seen the request."""


class NotSent(Lost):
    """No connection came about: the engine has seen nothing."""


class Reply:
    """An engine's answer, from the asking on. Read it to its end or `close` it; closing early makes the engine abort
    the request. `status` and what else is in its head are there when `begun` has returned."""

    # Most of these are set late, if at all: until then they are the class's.
    status = 0
    pairs: Sequence[tuple[bytes, bytes]] = ()
    framed = False
    heard = 0.0
    streams = False
    """Whether its body are server-sent events."""
    over = False
    """Nothing more comes of it."""
    _line: Line | None = None
    _waiter: asyncio.Future[None] | None = None
    _to: Callable[[bytes], None] | None = None
    _then: Callable[[], None] | None = None
    _unsent = False
    _held = False
    _ahead = False
    _size = 0
    _why = ""

    def __init__(self) -> None:
        self._data: list[bytes] = []

    @property
    def headers(self) -> list[tuple[str, str]]:
        return texts(self.pairs)

    @property
    def whole(self) -> bytes | None:
        """All of the body, if it is here and complete."""
        if not self.over or self._why:
            return None
        return self._data[0] if len(self._data) == 1 else b"".join(self._data)

    def then(self, call: Callable[[], None]) -> None:
        """Calls once, soon: when nothing more comes, or when it comes bit by bit and somebody has to read it."""
        self._then = call
        if self.over:
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        call, self._then = self._then, None
        if call is not None:
            call()

    async def begun(self) -> None:
        """Returns once the answer's head is here. Raises NotSent or Lost."""
        while not self.status and not self.over:
            await self._more()
        if not self.status:
            raise NotSent(self._why) if self._unsent else Lost(self._why)

    async def chunk(self) -> bytes:
        """What has arrived, at least a byte; b"" at the end. Raises Lost if the answer is cut short."""
        while not self._data and not self.over:
            await self._more()
        if self._data:
            data = self._data[0] if len(self._data) == 1 else b"".join(self._data)
            self._data.clear()
            self._size = 0
            if self._ahead:
                self._ahead = False
                if not self._held and self._line is not None:
                    self._line.resume()
            return data
        if self._why:
            raise Lost(self._why)
        return b""

    async def read(self, limit: int) -> bytes:
        """The whole body. Raises Lost, also past `limit` bytes."""
        parts: list[bytes] = []
        size = 0
        while data := await self.chunk():
            size += len(data)
            if size > limit:
                self.close()
                raise Lost(f"an answer of more than {limit} bytes")
            if self.over and not parts and not self._data and not self._why:
                return data
            parts.append(data)
        return b"".join(parts)

    async def pour(self, to: Callable[[bytes], None]) -> None:
        """Gives `to` all that comes, as it comes. Returns at the end; raises Lost if the answer is cut short."""
        while not self.over or self._data:
            if self._data:
                to(await self.chunk())
                continue
            self._to = to
            try:
                await self._more()
            finally:
                self._to = None
        if self._why:
            raise Lost(self._why)

    def pause(self) -> None:
        """Whoever it is read for is not as fast."""
        self._held = True
        if self._line is not None:
            self._line.pause()

    def resume(self) -> None:
        self._held = False
        if not self._ahead and self._line is not None:
            self._line.resume()

    def close(self, why: str = "") -> None:
        """Idempotent. A reader that is waiting gets Lost with `why`."""
        line = self._line
        self.ended(why or "it was closed")
        if line is not None:
            line.drop()

    async def _more(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # What `Upstream` and the connection call.

    def sent(self, line: Line) -> None:
        self._line = line

    def unsent(self, why: str) -> None:
        self._unsent = True
        self.ended(why)

    def began(self, status: int, pairs: list[tuple[bytes, bytes]], framed: bool, media: bytes) -> None:
        self.status, self.pairs, self.framed = status, pairs, framed
        self.heard = time.monotonic()
        if media != b"application/json":
            self.streams = media.partition(b";")[0].strip().lower() == b"text/event-stream"
        if self._waiter is not None:
            self._wake()
        elif self.streams and self._then is not None:
            self._tell()

    def came(self, data: bytes) -> None:
        if self.over:
            return
        self.heard = time.monotonic()
        if self._to is not None:
            self._to(data)
            return
        self._data.append(data)
        self._size += len(data)
        if self._size > AHEAD and not self._ahead:
            self._ahead = True
            if self._line is not None:
                self._line.pause()
            self._tell()
        if self._waiter is not None:
            self._wake()

    def ended(self, why: str = "") -> None:
        if self.over:
            return
        self.over = True
        self._line = None
        self._why = why
        if self._waiter is not None:
            self._wake()
        if self._then is not None:
            self._tell()


class Origin:
    """Where an engine's API is, and the connections to it. Raises ValueError for what is no address."""

    __slots__ = ("_free", "connecting", "host", "lines", "name", "port", "secure")

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.secure = parts.scheme == "https"
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if self.secure else 80)
        self.name = parts.netloc.rpartition("@")[2].encode("idna").decode()
        self.connecting = 0
        self.lines: set[Line] = set()
        self._free: dict[Line, float] = {}

    def made(self, line: Line) -> None:
        self.lines.add(line)

    def free(self, line: Line) -> None:
        self._free[line] = time.monotonic()

    def lost(self, line: Line) -> None:
        self.lines.discard(line)
        self._free.pop(line, None)

    def take(self) -> Line | None:
        """The one that was used last, if the engine cannot have given it up by now."""
        if not self._free:
            return None
        line, since = self._free.popitem()
        if time.monotonic() - since <= KEEP_SECONDS:
            return line
        line.drop()
        return None

    def drop(self, since: float) -> None:
        """Ends those that nobody has used since then."""
        for line in [line for line, last in self._free.items() if last <= since]:
            del self._free[line]
            line.drop()


class Upstream:
    """The connections to all engines, as many as are wanted: engines queue by what they can run, a pool would queue by
    a guess, unseen. Made inside a running loop; `close` it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._origins: dict[str, Origin] = {}
        self._connecting: set[asyncio.Task[None]] = set()
        self._tls: ssl.SSLContext | None = None
        self._timer = self._loop.call_later(KEEP_SECONDS, self._tidy)

    async def post(self, url: str, body: bytes, headers: Collection[tuple[str, str]]) -> Reply:
        """Returns once the answer's headers are here. Raises NotSent or Lost."""
        return await self.send("POST", url, headers, body)

    async def get(self, url: str, headers: Collection[tuple[str, str]]) -> Reply:
        return await self.send("GET", url, headers, None)

    async def send(self, method: str, url: str, headers: Collection[tuple[str, str]], body: bytes | None) -> Reply:
        """As `post`."""
        at = url.find("/", len("https://"))
        base, target = (url[:at], url[at:]) if at > 0 else (url, "/")
        head = lines(headers)
        if body is not None and all(name.lower() != "content-type" for name, _ in headers):
            head += b"Content-Type: application/json\r\n"
        reply = self.call(method, base, target, head, body)
        try:
            await reply.begun()
        except BaseException:
            reply.close()
            raise
        return reply

    def call(self, method: str, base: str, target: str, head: bytes, body: bytes | None) -> Reply:
        """Asks, and waits for nothing; what fails is told by the reply. `head` are header lines (`lines`)."""
        reply = Reply()
        origin = self._origins.get(base)
        if origin is None:
            try:
                origin = self._origins[base] = Origin(base)
            except ValueError:
                reply.unsent(f"cannot connect: {base} is no address")
                return reply
        length = b"" if body is None else b"Content-Length: %d\r\n" % len(body)
        # Bytes are passed on as they are, so nothing may be compressed on the way.
        start = f"{method} {target} HTTP/1.1\r\nHost: {origin.name}\r\nAccept-Encoding: identity\r\n".encode("latin-1")
        whole = b"%b%b%b\r\n" % (start, head, length)
        if (line := origin.take()) is not None:
            line.ask(reply, whole, body or b"")
        else:
            task = self._loop.create_task(self._connect(origin, reply, whole, body or b""))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)
        return reply

    async def close(self) -> None:
        self._timer.cancel()
        if self._connecting:
            await asyncio.wait(self._connecting, timeout=CONNECT_SECONDS)
        for origin in self._origins.values():
            for line in tuple(origin.lines):
                line.drop()

    async def _connect(self, origin: Origin, reply: Reply, head: bytes, body: bytes) -> None:
        """Not cancelled when nobody wants the answer any more: someone else may want the connection."""

        origin.connecting += 1
        tls = self._context() if origin.secure else None
        try:
            opening = self._loop.create_connection(
                lambda: Line(origin, reply, head, body), origin.host, origin.port, ssl=tls
            )
            await asyncio.wait_for(opening, CONNECT_SECONDS)
        except asyncio.TimeoutError:
            reply.unsent(f"no connection within {CONNECT_SECONDS:g} s")
        except (OSError, UnicodeError) as exc:
            reply.unsent(f"cannot connect: {getattr(exc, 'strerror', None) or exc}")
        finally:
            origin.connecting -= 1

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls

    def _tidy(self) -> None:
        """Connections that were not used for a while, and what is known of engines that are gone."""
        since = time.monotonic() - KEEP_SECONDS
        for base, origin in tuple(self._origins.items()):
            origin.drop(since)
            if not origin.lines and not origin.connecting:
                del self._origins[base]
        self._timer = self._loop.call_later(KEEP_SECONDS, self._tidy)
