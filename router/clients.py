"""All connections of clients: how many there may be, one clock for them, and the end."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Protocol

from deeplink.errors import DeeplinkError
from deeplink.router.head import Head

if TYPE_CHECKING:
    from deeplink.router.client import Client

CLEANUP_SECONDS = 2.0
"""For requests that were cut at the end to clean up after themselves."""


class Running(Protocol):
    """What answers a request: a task of the client's, or something else that says `Client.done`."""

    def cancel(self) -> object:
        """The client has left."""


class Api(Protocol):
    """Who answers what clients ask for."""

    def limit(self, head: Head) -> int:
        """How many bytes of body the request may have; asked once its head is here, and not again for requests with the
        same head. Raises DeeplinkError if it is refused for its head alone."""

    def start(self, head: Head, body: bytes, client: Client) -> None:
        """Begins to answer through the client: at once, or by what it then says `runs` for it."""

    def refused(self, head: Head | None, error: DeeplinkError) -> tuple[int, bytes, bytes]:
        """Status, header lines and body for what is not served at all; None if it could not be read."""


class Clients:
    """`seconds` is for a head to arrive, `most` how many connections there may be. Made in a running loop."""

    def __init__(self, api: Api, most: int, seconds: float) -> None:
        self.api = api
        self.seconds = seconds
        self.closing = False
        self.now = time.monotonic()
        """As it was at the last look: good enough for all that takes seconds."""
        self._most = most
        self._open: set[Client] = set()
        self._loop = asyncio.get_running_loop()
        self._every = min(1.0, seconds / 4)
        self._timer = self._loop.call_later(self._every, self._look)
        self._none = asyncio.Event()

    def admit(self, client: Client) -> bool:
        if self.closing or len(self._open) >= self._most:
            return False
        self._open.add(client)
        return True

    def left(self, client: Client) -> None:
        """Its connection is over, and so is what ran for it."""
        self._open.discard(client)
        if not self._open:
            self._none.set()

    async def close(self, seconds: float) -> None:
        """Ends those that wait for nothing; requests that run have `seconds` to end."""
        self.closing = True
        for client in tuple(self._open):
            client.wind_up()
        for allowed in (seconds, CLEANUP_SECONDS):
            if not self._open:
                break
            self._none.clear()
            try:
                await asyncio.wait_for(self._none.wait(), allowed)
            except asyncio.TimeoutError:
                for client in tuple(self._open):
                    client.abort()
        self._timer.cancel()

    def _look(self) -> None:
        """One clock for all, so that no connection and no request has a timer of its own."""
        self.now = now = time.monotonic()
        for client in [client for client in self._open if client.until < now]:
            client.late()
        self._timer = self._loop.call_later(self._every, self._look)
