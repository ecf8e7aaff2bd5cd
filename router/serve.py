"""Listening for clients: how many at a time, how long they may take to say what they want, TLS, and the end.

Past the head of a request the HTTP server and the handlers have limits of their own.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from deeplink.config import Config, RouterSection, RouterTlsSection
from deeplink.errors import ConfigError
from deeplink.router.app import make_app
from deeplink.router.parts import LISTED

MAX_HEAD = 64 << 10
"""Bytes of a request's head; one line of it may have 8190."""
SHUTDOWN_SECONDS = 60.0
"""For the requests that run when the router is told to stop."""

log = logging.getLogger(__name__)


class _Unquoted(logging.Filter):
    """What cannot be read as HTTP may be any part of a request; errors about it quote it."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(record.exc_info[1], HttpProcessingError):
            record.msg, record.args = "a request that is not HTTP was refused", ()
            record.exc_info = record.exc_text = None
            record.levelno, record.levelname = logging.INFO, "INFO"
        return True


_http_log = logging.getLogger(f"{__name__}.http")
_http_log.addFilter(_Unquoted())


class Guard(asyncio.Protocol):
    """Stands before the HTTP server's protocol until the head of the connection's first request has arrived. Later
    requests come within the server's keep-alive timeout."""

    def __init__(self, inner: asyncio.Protocol, open_: set[Guard], limit: int, seconds: float) -> None:
        self._inner = inner
        self._open = open_
        self._limit = limit
        self._seconds = seconds
        self._transport: asyncio.BaseTransport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._size = 0
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if len(self._open) >= self._limit:
            transport.close()
            return
        self._open.add(self)
        self._transport = transport
        self._timer = asyncio.get_running_loop().call_later(self._seconds, transport.close)
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._transport is None:
            return
        if self._timer is not None and not self._fits(data):
            self._transport.close()
            return
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._transport is not None else None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._open.discard(self)
        if self._transport is not None:
            self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def _fits(self, data: bytes) -> bool:
        """Whether the head, of which this is more, is not too large. Stops the clock at its end."""
        seen = self._tail + data
        ends = [at for mark in (b"\n\r\n", b"\n\n") if (at := seen.find(mark)) >= 0]
        self._size += min(ends, default=len(data))
        self._tail = seen[-2:]
        if ends and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return self._size <= MAX_HEAD


def run(config: Config, secret: bytes, path: Path | None = None) -> None:
    """Serve until SIGINT or SIGTERM; the engines that the file at `path` lists are followed, at once on SIGHUP.

    Raises OSError if the address cannot be had, ConfigError for keys or certificates that cannot be used, PluginError
    for a policy that nobody has.
    """
    _loop()(_run(config, secret, path))


def _loop() -> Callable[[Coroutine[Any, Any, None]], None]:
    """What runs it: uvloop where that is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run
    return uvloop.run


async def _run(config: Config, secret: bytes, path: Path | None) -> None:
    app = make_app(config, secret, path=path)
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with serving(app, config.router) as port:
        loop.add_signal_handler(signal.SIGHUP, app[LISTED].look_now)
        scheme = "https" if config.router.tls else "http"
        log.info("listening on %s://%s:%d", scheme, config.router.host, port)
        await stop.wait()


@asynccontextmanager
async def serving(
    app: web.Application, section: RouterSection, *, shutdown: float = SHUTDOWN_SECONDS
) -> AsyncIterator[int]:
    """Listens at the section's address while the context lasts; gives the port. On leaving, requests that run have
    `shutdown` seconds to end."""
    context = load_tls(section.tls)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown, logger=_http_log)
    await runner.setup()
    try:
        server = runner.server
        assert server is not None
        guards: set[Guard] = set()
        listening = await asyncio.get_running_loop().create_server(
            lambda: Guard(server(), guards, section.max_connections, section.header_seconds),
            section.host,
            section.port,
            ssl=context,
            ssl_handshake_timeout=section.header_seconds if context else None,
            backlog=1024,
        )
        try:
            yield listening.sockets[0].getsockname()[1]
        finally:
            listening.close()
    finally:
        await runner.cleanup()


def load_tls(section: RouterTlsSection | None) -> ssl.SSLContext | None:
    """Raises ConfigError for files that cannot be used."""
    if section is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(section.certificate, section.key)
    except (OSError, ssl.SSLError) as exc:
        raise ConfigError(
            f"cannot use the certificate {section.certificate} with the key {section.key}: {exc}", field="router.tls"
        ) from exc
    return context
