"""One connection of a client: from bytes to requests, and answers back, one after the other.

A request that comes before the answer to an earlier one is out waits for its turn. What is refused ends the connection;
what the client still sends is read for a while and thrown away, or it would not see why.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import httptools

from deeplink.errors import DeeplinkError, InvalidRequest, RequestTooLarge
from deeplink.router.answers import BODILESS, head
from deeplink.router.clients import Clients, Running
from deeplink.router.exchange import Source
from deeplink.router.head import MAX_HEAD, MAX_HEADERS, MAX_LINE, Head, read, too_large
from deeplink.router.repeated import Repeated

UPLOAD_SECONDS = 60.0
"""For a request's body."""
KEEP_SECONDS = 630.0
"""For the next request: longer than the balancers before a router keep their own connections."""
STALL_SECONDS = 60.0
"""For a client to read something of its answer."""
LINGER_SECONDS = 2.0
"""For what a client still sends after it was refused."""
MAX_WAITING = 32
"""Requests on one connection that wait for the answers to earlier ones."""
_NEVER = float("inf")

log = logging.getLogger(__name__)


class Client(asyncio.Protocol):
    """`until` is when something has to have happened, of time.monotonic, or the connection ends."""

    def __init__(self, clients: Clients, loop: asyncio.AbstractEventLoop) -> None:
        self.until = _NEVER
        self._clients = clients
        self._api = clients.api
        self._loop = loop
        self._request: Head | None = None  # of which not all is here
        self._served: Head | None = None
        self._waiting: deque[tuple[Head | None, bytes, DeeplinkError | None]] = deque()
        self._repeated = Repeated[Head]()
        self._fresh = b""  # a read with which a request begins
        self._left = 0  # bytes of a body whose head was known
        self._running: Running | None = None
        self._started = False
        self._source: Source | None = None
        self._begun = False  # whether something of a request is here
        self._url = b""
        self._pairs: list[tuple[bytes, bytes]] = []
        self._parts: list[bytes] = []
        self._size = self._limit = 0  # of the body
        self._chunk = self._first = 0  # bytes of the last read, and of that with which this request began
        self._read = 0  # bytes of it since then
        self._ahead = 0  # of later requests than the one that is served
        self._deaf = self._last = self._lingers = self._over = False
        self._full = self._held = self._began = self._chunked = False
        self._head = b""

    # What the connection calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        if not self._clients.admit(self):
            self._over = True
            transport.close()
            return
        self._parser = httptools.HttpRequestParser(self)
        self.until = self._clients.now + self._clients.seconds

    def data_received(self, data: bytes) -> None:
        if self._deaf or self._over:
            return
        if self._left:
            self._fill(data)
            return
        if not self._begun:
            if self._served is None and not self._waiting:
                body = self._repeated.body(data)
                if body is not None and self._known(self._repeated.meaning, body, self._repeated.left):
                    return
            self._fresh = data
        self._chunk = size = len(data)
        self._read += size
        if self._served is not None:
            self._ahead += size
            if self._ahead > MAX_HEAD and not self._held:
                self._held = True
                self._transport.pause_reading()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if not self._deaf:
                self._refuse(InvalidRequest("what was sent is not HTTP/1.1, or could be read in more than one way"))
            return
        finally:
            self._fresh = b""
        # The parser has no limit for a head, nor for what frames chunks.
        if self._read > MAX_HEAD + 8 * self._size and not self._deaf:
            self._refuse(InvalidRequest(f"more than {MAX_HEAD} bytes that are not of the request's body"))

    def _known(self, head: Head, body: bytes, left: int) -> bool:
        """What the parser would make of a head that came before. False if that is its business."""
        if len(body) + left > head.limit:
            return False
        if left:
            self._request, self._begun = head, True
            self._parts = [body]
            self._left = left
            self.until = self._clients.now + UPLOAD_SECONDS
        else:
            self._start(head, body)
        return True

    def _fill(self, data: bytes) -> None:
        """Of a body whose head was known."""
        head, left = self._request, self._left
        self._parts.append(data[:left])
        self._left = max(0, left - len(data))
        if self._left or head is None:
            return
        body, self._parts = b"".join(self._parts), []
        self._request, self._begun = None, False
        self._start(head, body)
        if len(data) > left:
            self.data_received(data[left:])

    def connection_lost(self, exc: Exception | None) -> None:
        self._over = self._deaf = True
        self.until = _NEVER
        self._waiting.clear()
        if self._running is None:
            self._clients.left(self)
        else:
            self._cancel(self._running)

    def pause_writing(self) -> None:
        self._full = True
        self.until = self._clients.now + STALL_SECONDS
        if self._source is not None:
            self._source.pause()

    def resume_writing(self) -> None:
        self._full = False
        self._wait()
        if self._source is not None:
            self._source.resume()
        self._next()

    # What the parser calls.

    def on_message_begin(self) -> None:
        self._url = b""
        self._pairs = []
        self._begun = True
        self._first = self._chunk
        self._read = self._size = 0
        if self._served is None:
            self.until = self._clients.now + self._clients.seconds

    def on_url(self, data: bytes) -> None:
        self._url += data

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._request is None:  # else it is a trailer, which nobody reads
            self._pairs.append((name, value))

    def on_headers_complete(self) -> None:
        if self._deaf:
            return
        parser = self._parser
        try:
            # A head that came in a few bytes is no larger than that.
            large = self._first + self._read > MAX_LINE or len(self._pairs) > MAX_HEADERS
            if large and (why := too_large(self._url, self._pairs)):
                raise InvalidRequest(why)
            self._request = request = read(
                parser.get_method().decode(),
                self._url.decode("latin-1"),
                self._pairs,
                parser.get_http_version(),
                parser.should_keep_alive(),
            )
            request.limit = self._limit = self._api.limit(request)
            if request.length > self._limit:
                raise _too_large(self._limit)
        except DeeplinkError as error:
            self._refuse(error)
            return
        if self._fresh and request.repeats and self._repeated.remember(self._fresh, request.length):
            self._request = self._repeated.meaning = request.unsized()
        if self._served is None:
            self.until = self._clients.now + UPLOAD_SECONDS
            if b"expect" in request.given and request.expects:
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        if self._request is None:
            return
        self._size += len(data)
        if self._size > self._limit:
            self._refuse(_too_large(self._limit))
        else:
            self._parts.append(data)

    def on_message_complete(self) -> None:
        request, parts = self._request, self._parts
        if request is None:
            return
        self._request = None
        body = b""
        if parts:
            body = parts[0] if len(parts) == 1 else b"".join(parts)
            self._parts = []
        self._begun = False
        self._read = self._size = 0
        self._deaf = not request.keep
        if self._served is None and not self._waiting:
            self._start(request, body)
        elif len(self._waiting) < MAX_WAITING:
            self._waiting.append((request, body, None))
        else:
            self._refuse(InvalidRequest(f"more than {MAX_WAITING} requests that wait for their answers"))

    # What answers a request.

    @property
    def peer(self) -> Any:
        """The other end's address."""
        return self._transport.get_extra_info("peername")

    def answer(self, status: int, headers: bytes, body: bytes) -> None:
        """All of it; `headers` are lines."""
        served = self._served
        self._began = True
        if status in BODILESS:
            self._transport.write(head(status, headers, b"", last=self._ends()))
            return
        start = head(status, headers, b"Content-Length: %d\r\n" % len(body), last=self._ends())
        self._transport.write(start if served is not None and served.method == "HEAD" else start + body)

    def begin(self, status: int, headers: bytes, source: Source) -> None:
        """What follows with `more` until `finish`. `source` is paused while the client does not read as fast."""
        self._began = True
        self._chunked = self._served is not None and self._served.modern
        self._last = self._last or not self._chunked  # then it ends with the connection
        self._head = head(
            status, headers, b"Transfer-Encoding: chunked\r\n" if self._chunked else b"", last=self._ends()
        )
        self._source = source
        if self._full:
            source.pause()

    def more(self, data: bytes) -> None:
        if data and not self._over:
            start, self._head = self._head, b""
            self._transport.write(b"%b%x\r\n%b\r\n" % (start, len(data), data) if self._chunked else start + data)

    def finish(self) -> None:
        self._source = None
        if not self._over:
            self._transport.write(self._head + (b"0\r\n\r\n" if self._chunked else b""))
        self._head = b""

    def raw(self, data: bytes, source: Source) -> None:
        """Bytes of an answer that someone else writes, which ends with the connection."""
        self._began = self._last = True
        self._source = source
        if not self._over:
            self._transport.write(data)

    def task(self, work: Coroutine[Any, Any, None]) -> None:
        """What runs for the request from now on; its end is the request's."""
        self._started = False
        self._running = self._loop.create_task(self._run(work))

    def runs(self, what: Running) -> None:
        """As `task`, without one: it calls `done` when it has ended."""
        self._running = what

    def guarded(self, work: Callable[[], None]) -> None:
        """Does something for the request that no task does; `done` ends that."""
        try:
            work()
        except Exception as exc:  # noqa: BLE001 - see _failed
            self._failed(exc)

    def done(self) -> None:
        """The request is done with, and the next may begin."""
        ends = self._ends()
        self._served = self._running = self._source = None
        if self._over:
            self._clients.left(self)
        elif ends:
            self._hang_up()
        else:
            self._ahead = 0
            if self._held:
                self._held = False
                self._transport.resume_reading()
            self._wait()
            if self._waiting:
                self._loop.call_soon(self._next)

    # What `Clients` calls.

    def late(self) -> None:
        """`until` has passed."""
        if self._served is None and self._request is not None and not self._full:
            self._refuse(InvalidRequest(f"the request body did not arrive within {UPLOAD_SECONDS:g} s"))
        else:
            self.abort()

    def wind_up(self) -> None:
        """No request may begin any more."""
        if self._served is None and not self._waiting:
            self.abort()

    def abort(self) -> None:
        """What runs is cancelled once the connection is lost."""
        self._over = True
        self._transport.abort()

    # Turns.

    def _ends(self) -> bool:
        """Whether the connection ends with this answer."""
        return self._last or self._clients.closing or (self._served is not None and not self._served.keep)

    def _start(self, head: Head, body: bytes) -> None:
        self._served = head
        self._began = False
        if not self._full:
            self.until = _NEVER
        try:
            self._api.start(head, body, self)
        except Exception as exc:  # noqa: BLE001 - see _failed
            self._failed(exc)

    def _cancel(self, running: Running) -> None:
        # A task that has not begun would never run at all, and so not clean up.
        if self._started or not isinstance(running, asyncio.Task):
            running.cancel()

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        self._started = True
        if self._over and (task := asyncio.current_task()) is not None:
            task.cancel()
        try:
            await work
        except Exception as exc:  # noqa: BLE001 - see _failed
            self._failed(exc)
        else:
            self.done()
        finally:
            if self._running is not None:  # it was cancelled
                self.done()

    def _failed(self, exc: Exception) -> None:
        """The one place to which anything may come: a fault of ours is one request's. Its text may quote."""
        where = "".join(traceback.format_tb(exc.__traceback__))
        log.error("a request failed within the router: %s\n%s", type(exc).__name__, where)
        if self._began:
            self.abort()
        else:
            self.answer(*self._api.refused(self._served, DeeplinkError("a fault of the router's own")))
        self.done()

    def _next(self) -> None:
        if self._served is not None or self._full or self._over or not self._waiting:
            return
        request, body, error = self._waiting.popleft()
        if error is None and request is not None:
            self._start(request, body)
        elif error is not None:
            self._tell(request, error)

    def _refuse(self, error: DeeplinkError) -> None:
        """Hears nothing more, and says why in its turn."""
        if self._lingers:
            return
        request, self._request = self._request, None
        self._deaf = self._lingers = True
        self._parts = []
        if self._served is None and not self._waiting:
            self._tell(request, error)
        else:
            self._waiting.append((request, b"", error))

    def _tell(self, request: Head | None, error: DeeplinkError) -> None:
        self._last = True
        self._served = request
        self.answer(*self._api.refused(request, error))
        self._served = None
        self._hang_up()

    def _hang_up(self) -> None:
        """The last answer is out."""
        if not self._lingers:
            self._over = True
            self._transport.close()
            return
        self.until = self._clients.now + LINGER_SECONDS
        if self._held:
            self._held = False
            self._transport.resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def _wait(self) -> None:
        """Sets the clock for what is waited for now."""
        if self._full:
            return
        clients = self._clients
        if self._served is not None:
            self.until = _NEVER
        elif not self._begun:
            self.until = clients.now + KEEP_SECONDS
        else:
            self.until = clients.now + (clients.seconds if self._request is None else UPLOAD_SECONDS)


def _too_large(limit: int) -> RequestTooLarge:
    return RequestTooLarge(f"the request body is larger than {limit} bytes")
