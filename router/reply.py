"""An engine's answer as it comes: waited for, read, or passed on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from deeplink.router.headers import texts
from deeplink.router.line import Heading, Line

AHEAD = 1 << 18
"""Bytes of an answer that are read before anyone wants them."""


_NO_HEADING = Heading(0, [], False, False)


class Lost(Exception):
    """The connection broke, or the answer was not one. The engine may have seen the request."""


class NotSent(Lost):
    """No connection came about: the engine has seen nothing."""


class Reply:
    """An engine's answer, from the asking on. Read it to its end or `close` it; closing early makes the engine abort
    the request. `status` and what else is in its head are there when `begun` has returned."""

    __slots__ = (
        "_ahead",
        "_data",
        "_held",
        "_line",
        "_size",
        "_then",
        "_to",
        "_unsent",
        "_waiter",
        "_why",
        "heading",
        "heard",
        "over",
    )

    def __init__(self) -> None:
        self.heading = _NO_HEADING
        self.heard = 0.0
        self.over = False
        """Nothing more comes of it."""
        self._data: list[bytes] = []
        self._line: Line | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._to: Callable[[bytes], None] | None = None
        self._then: Callable[[], None] | None = None
        self._unsent = self._held = self._ahead = False
        self._size = 0
        self._why = ""

    @property
    def status(self) -> int:
        return self.heading.status

    @property
    def streams(self) -> bool:
        return self.heading.streams

    @property
    def framed(self) -> bool:
        return self.heading.framed

    @property
    def pairs(self) -> list[tuple[bytes, bytes]]:
        return self.heading.pairs

    @property
    def headers(self) -> list[tuple[str, str]]:
        return texts(self.pairs)

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

    @contextmanager
    def closed_unless_done(self) -> Iterator[None]:
        """A context out of which only success leads without closing: also whoever is cancelled in it wants nothing."""
        done = False
        try:
            yield
            done = True
        finally:
            if not done:
                self.close()

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

    def began(self, heading: Heading) -> None:
        self.heading = heading
        self.heard = time.monotonic()
        if self._waiter is not None:
            self._wake()
        elif heading.streams and self._then is not None:
            self._tell()

    def answered(self, heading: Heading, body: bytes) -> None:
        self.heading = heading
        if body:
            self._data.append(body)
        self.ended()

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
