"""How far an engine's model has come with what it was sent.

LMDeploy sends its model the next forward before the last one's answer is there. When a request leaves in between, its
blocks are free and soon another's, while the forward that was sent still writes one of its tokens there. The engine
itself never minds: whatever it computes into these blocks comes later. What lands from another engine does not, so it
has to wait for the forwards that had been sent when it got its blocks.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from deeplink.errors import DeadlineExceeded

if TYPE_CHECKING:
    from lmdeploy_deeplink.migration.spread import Workers

GRACE = 5.0
"""Seconds beyond those that processes wait within which they say so."""


class Forwards:
    """Counts them. All of it runs on the thread of the engine's loop."""

    def __init__(self) -> None:
        self._sent = 0
        self._over = 0
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    def send(self) -> None:
        """One was sent to the model. It runs them in this order."""
        self._sent += 1

    def end(self, count: int = 1) -> None:
        """So many have run, or never will: they write to no block any more."""
        self._over += count
        for wanted, ended in self._waiting:
            if wanted <= self._over and not ended.done():
                ended.set_result(None)

    async def passed(self, seconds: float) -> None:
        """Wait until all that were sent before this call have ended. Raises DeadlineExceeded after `seconds`."""
        await self.until(self._sent, seconds)

    async def until(self, sent: int, seconds: float) -> None:
        """Wait until the first so many have ended. Raises DeadlineExceeded after `seconds`."""
        if self._over >= sent:
            return
        waiting = (sent, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            await asyncio.wait_for(waiting[1], seconds)
        except asyncio.TimeoutError:
            raise DeadlineExceeded(
                f"the engine has not run in {seconds:g} s what it had sent to its model before this handoff",
                remedy="the engine is stuck or overloaded; see its log",
            ) from None
        finally:
            self._waiting.remove(waiting)


class SpreadForwards:
    """The same of an engine that is spread over processes: it counts what it sends, and they what has ended there."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._sent = 0

    def send(self) -> None:
        """One is about to be sent to all of them."""
        self._sent += 1

    async def passed(self, seconds: float) -> None:
        """As of `Forwards`, in all processes."""
        calls = self._workers.call("passed", self._sent, seconds)
        try:
            await asyncio.wait_for(asyncio.gather(*calls), seconds + GRACE)
        except asyncio.TimeoutError:
            raise DeadlineExceeded(
                f"a process of this engine has not answered in {seconds + GRACE:g} s",
                remedy="the engine is stuck or overloaded; see its log",
            ) from None
