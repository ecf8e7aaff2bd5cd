"""Calls to an engine's API. Whatever carries the bytes is behind `Upstream`; the flow sees only what is
here."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Iterable

import aiohttp

CONNECT_SECONDS = 2.0
# Below the 5 s after which the engines' HTTP server closes an idle connection: of the two ends only the one
# that would send next can do it without losing a request.
KEEP_SECONDS = 2.0


class Lost(Exception):
    """The connection broke, or the answer was not one. The engine may have seen the request."""


class NotSent(Lost):
    """No connection came about: the engine has seen nothing."""


class Reply:
    """An engine's answer. Read it to its end or `close` it; closing early makes the engine abort the
    request."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self._why = ""
        self.status = response.status
        self.headers = [(name, value) for name, value in response.headers.items()]
        self.media = response.content_type
        self.heard = time.monotonic()

    @property
    def framed(self) -> bool:
        """Whether HTTP itself tells a complete answer from one cut short."""
        headers = self._response.headers
        return "Content-Length" in headers or "chunked" in headers.get("Transfer-Encoding", "").lower()

    async def chunk(self) -> bytes:
        """What has arrived, at least a byte; b"" at the end. Raises Lost if the answer is cut short."""
        try:
            data = await self._response.content.readany()
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as exc:
            raise Lost(self._why or _cause(exc)) from exc
        if not data and self._why:
            raise Lost(self._why)
        self.heard = time.monotonic()
        return data

    async def read(self, limit: int) -> bytes:
        """The whole body. Raises Lost, also past `limit` bytes."""
        parts: list[bytes] = []
        size = 0
        while data := await self.chunk():
            size += len(data)
            if size > limit:
                self.close()
                raise Lost(f"an answer of more than {limit} bytes")
            parts.append(data)
        return b"".join(parts)

    def close(self, why: str = "") -> None:
        """Idempotent. A reader that is waiting gets Lost with `why`."""
        self._why = self._why or why
        self._response.close()


class Upstream:
    """The connections to all engines. Made inside a running loop; `close` it."""

    def __init__(self) -> None:
        # Without a limit of our own: engines queue by what they can run, a pool would queue by a guess,
        # unseen. Bytes are passed on as they are, so nothing may be compressed on the way nor redirected.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept"),
        )

    async def post(self, url: str, body: bytes, headers: Iterable[tuple[str, str]]) -> Reply:
        """Returns once the answer's headers are here. Raises NotSent or Lost."""
        return await self.send("POST", url, headers, body)

    async def get(self, url: str, headers: Iterable[tuple[str, str]]) -> Reply:
        return await self.send("GET", url, headers, None)

    async def send(self, method: str, url: str, headers: Iterable[tuple[str, str]], body: bytes | None) -> Reply:
        send = [*headers, ("Accept-Encoding", "identity")]
        if body is not None and all(name.lower() != "content-type" for name, _ in send):
            send.append(("Content-Type", "application/json"))
        # As a file, a large body is written in pieces; as bytes it would be in one, and hold everyone else
        # up.
        data = None if body is None else io.BytesIO(body)
        try:
            return Reply(await self._session.request(method, url, data=data, headers=send, allow_redirects=False))
        except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as exc:
            # Connecting is all that has a timeout here.
            raise NotSent(_cause(exc)) from exc
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as exc:
            raise Lost(_cause(exc)) from exc

    async def close(self) -> None:
        await self._session.close()


def _cause(exc: BaseException) -> str:
    """What happened, in words; some of these errors have none of their own."""
    if isinstance(exc, aiohttp.ClientConnectorError):
        return f"cannot connect: {exc.strerror or exc.os_error}"
    if isinstance(exc, aiohttp.ServerTimeoutError):
        return f"no connection within {CONNECT_SECONDS:g} s"
    if isinstance(exc, aiohttp.ServerDisconnectedError):
        return "the connection was closed before an answer came"
    if isinstance(exc, aiohttp.ClientPayloadError):
        return "the connection was closed in the middle of the answer"
    return f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
