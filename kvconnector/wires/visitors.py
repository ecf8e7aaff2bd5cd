"""Who connects to an HTTP server of aiohttp's: so many at a time, and each has so long to ask something.

aiohttp itself waits for a first request for ever, and its connections are file descriptors of the engine's process.
"""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web

FIRST_SECONDS = 10.0
MAX_CONNECTIONS = 1024
"""An early handoff holds one while its prefill is waited for."""

log = logging.getLogger(__name__)


class Visitors:
    """The factory of protocols to listen with, in place of `server` itself. Whoever handles a request says so."""

    def __init__(self, server: web.Server, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self._silent: dict[asyncio.BaseProtocol, asyncio.TimerHandle] = {}

    def __call__(self) -> asyncio.BaseProtocol:
        if len(self._server.connections) >= MAX_CONNECTIONS:
            log.warning("deeplink control endpoint: a connection beyond %d was turned away", MAX_CONNECTIONS)
            return _TurnedAway()
        visitor = self._server()
        self._silent[visitor] = self._loop.call_later(FIRST_SECONDS, self._leave, visitor)
        return visitor

    def asked(self, request: web.Request) -> None:
        """From now on aiohttp's own limits hold."""
        if (timer := self._silent.pop(request.protocol, None)) is not None:
            timer.cancel()

    def _leave(self, visitor: web.RequestHandler) -> None:
        del self._silent[visitor]
        visitor.force_close()


class _TurnedAway(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()
