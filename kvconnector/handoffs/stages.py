"""How far a prefill is, for whoever waits for it in an event loop.

It is what the control endpoint tells a router, which asks the decode engine once there is something to fetch: an engine
that was asked before would have a request that it can only look at again and again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter

from deeplink.kvconnector.handoffs.watching import Watching
from deeplink.kvconnector.wires.tls import Tls


class Stages:
    """Of the handoffs of one producer, which listens at `address`. All but `close` runs in the loop it was made for."""

    def __init__(self, address: str, secret: bytes, tls: Tls | None, loop: asyncio.AbstractEventLoop) -> None:
        self._address = address
        self._loop = loop
        self._watching = Watching(secret, tls, self._tell)
        self._asking: Counter[str] = Counter()
        self._news = asyncio.Event()
        self._closed = False

    async def further(self, handoff: str, known: int, seconds: float) -> int:
        """The stage of a handoff (`handoff.BEGUN` and its like), once it is further than `known`; or what is known of
        it after `seconds`, or when this is closed."""
        until = time.monotonic() + seconds
        self._asking[handoff] += 1
        try:
            while not self._closed:
                news = self._news  # before it is looked at, so that what comes in between is not missed
                stage = self._watching.stage_at(self._address, handoff, math.inf)
                left = until - time.monotonic()
                if stage > known or left <= 0:
                    return stage
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(news.wait(), left)
            return known
        finally:
            self._asking[handoff] -= 1
            if not self._asking[handoff]:
                del self._asking[handoff]
                self._watching.forget_at(self._address, handoff)

    def close(self) -> None:
        """Any thread. Whoever waits is answered."""
        self._closed = True
        self._watching.close()
        self._tell()

    def _tell(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop may have been closed: nobody asks any more
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()
