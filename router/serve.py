"""Listening for clients: the address, TLS, signals, and the end."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from deeplink.config import Config, RouterSection, RouterTlsSection
from deeplink.errors import ConfigError
from deeplink.router import inner
from deeplink.router.app import make_app
from deeplink.router.client import Client
from deeplink.router.clients import Clients
from deeplink.router.head import MAX_HEAD
from deeplink.router.parts import API, LISTED

__all__ = ["MAX_HEAD", "load_tls", "run", "serving"]

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


def run(config: Config, secret: bytes, path: Path | None = None) -> None:
    """Serve until SIGINT or SIGTERM; the engines that the file at `path` lists are followed, at once on SIGHUP.

    Raises OSError if the address cannot be had, ConfigError for keys or certificates that cannot be used, PluginError
    for a policy that nobody has.
    """
    loop_runner()(_run(config, secret, path))


def loop_runner() -> Callable[[Coroutine[Any, Any, None]], None]:
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
        spare_the_collector()
        loop.add_signal_handler(signal.SIGHUP, app[LISTED].look_now)
        scheme = "https" if config.router.tls else "http"
        log.info("listening on %s://%s:%d", scheme, config.router.host, port)
        await stop.wait()


def spare_the_collector() -> None:
    """What is there when a router begins to serve stays, and requests leave no cycles: looking for some after every few
    requests takes longer than serving them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


@asynccontextmanager
async def serving(
    app: web.Application, section: RouterSection, *, shutdown: float = SHUTDOWN_SECONDS
) -> AsyncIterator[int]:
    """Listens at the section's address while the context lasts; gives the port. On leaving, requests that run have
    `shutdown` seconds to end."""
    context = load_tls(section.tls)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, logger=_http_log)
    await runner.setup()
    try:
        api, loop = app[API], asyncio.get_running_loop()
        assert runner.server is not None
        api.library = partial(inner.serve, runner.server)
        clients = Clients(api, section.max_connections, section.header_seconds)
        try:
            listening = await loop.create_server(
                lambda: Client(clients, loop),
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
                await app.shutdown()  # what would never end by itself
        finally:
            await clients.close(shutdown)
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
