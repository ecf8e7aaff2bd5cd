"""Calls to an engine's API. Whatever carries the bytes is behind `Upstream`; the flow sees only what is
here."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Collection
from urllib.parse import urlsplit

from deeplink.router.asking import Asking
from deeplink.router.headers import JSON_LINE, lines
from deeplink.router.line import Line
from deeplink.router.reply import Lost, NotSent, Reply

__all__ = ["Lost", "NotSent", "Reply", "Upstream"]

CONNECT_SECONDS = 2.0
# Below the 5 s after which the engines' HTTP server closes an idle connection: of the two ends only the one
# that would send next can do it without losing a request.
KEEP_SECONDS = 2.0


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
        return await self._send("POST", url, headers, body)

    async def get(self, url: str, headers: Collection[tuple[str, str]]) -> Reply:
        return await self._send("GET", url, headers, b"")

    async def _send(self, method: str, url: str, headers: Collection[tuple[str, str]], body: bytes) -> Reply:
        at = url.find("/", len("https://"))
        base, target = (url[:at], url[at:]) if at > 0 else (url, "/")
        head = lines(headers)
        if method == "POST" and all(name.lower() != "content-type" for name, _ in headers):
            head += JSON_LINE
        reply = self.call(base, Asking(method, target, head), body)
        with reply.closed_unless_done():
            await reply.begun()
        return reply

    def call(self, base: str, asking: Asking, body: bytes) -> Reply:
        """Asks, and waits for nothing; what fails is told by the reply. An empty body is said to be one where the
        method is one of those that have any."""
        reply = Reply()
        origin = self._origins.get(base)
        if origin is None:
            try:
                origin = self._origins[base] = Origin(base)
            except ValueError:
                reply.unsent(f"cannot connect: {base} is no address")
                return reply
        start = asking.head(origin.name)
        said = body or asking.method == "POST"
        head = b"%bContent-Length: %d\r\n\r\n" % (start, len(body)) if said else start + b"\r\n"
        if (line := origin.take()) is not None:
            line.ask(reply, head, body)
        else:
            task = self._loop.create_task(self._connect(origin, reply, head, body))
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
