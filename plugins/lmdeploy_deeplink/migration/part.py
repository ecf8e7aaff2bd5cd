"""One process's part of an engine's cache: what is offered of it, and what is loaded into it.

| method | on | |
|---|---|---|
| offer, settled, staged, abort | prefill | a prompt's cache, until its blocks are no longer needed |
| load, cancel | decode | into blocks that are the engine's again when it has ended, or was cancelled |
| withhold, refuse | either | of a handoff that there will not be, why |

All of it runs on the thread of the process's loop, which also computes, so a gather sees blocks that nothing writes to.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from deeplink.errors import DeeplinkError, Reason
from deeplink.kvconnector import configured
from deeplink.kvconnector.caches.group import Group
from deeplink.kvconnector.contracts.contract import Contract
from deeplink.kvconnector.endpoint import Endpoint
from deeplink.kvconnector.handoffs.first_token import FirstToken
from deeplink.kvconnector.handoffs.order import Order, Outcome
from deeplink.kvconnector.handoffs.ticket import Ticket
from deeplink.kvconnector.relayout import compiled
from deeplink.kvconnector.wires.tls import Tls
from deeplink.plugins import load_plugins

if TYPE_CHECKING:
    from deeplink.config import KVSection
    from deeplink.registry import Registry

LOOK = 0.005
"""Seconds between two looks at what has ended."""
STAGED_LOOK = 0.02
"""Seconds between two looks whether a prompt's cache is staged, where staging was full."""

log = logging.getLogger("lmdeploy.deeplink")

State = Callable[[Group, str, dict[str, str], tuple[str, ...]], Contract]
"""The contract of a process, of its cache, the address of its channel, those of its transports, and the casts."""

_running: weakref.WeakSet[Part] = weakref.WeakSet()


def end_all(why: str) -> None:
    """What this process states of its cache is about to be wrong. Any thread."""
    for part in list(_running):
        part.end(why)


class Part:
    """Reads the cache, proves its layout and listens from the moment it is made. Raises what keeps it from that.

    `read` gives the cache, of the layouts that are known; `rank` is the process's place among those of the engine.
    `ended` is called when no more is handed over because of what happens in this process.
    """

    def __init__(
        self,
        settings: KVSection,
        secret: bytes,
        epoch: str,
        read: Callable[[Registry[str]], Group],
        state: State,
        rank: int = 0,
        ended: Callable[[], None] | None = None,
    ) -> None:
        plugins = load_plugins()
        # Not within the time of the first handoff.
        log.info("deeplink re-layout is ready after %.1f s of compiling", compiled.warm())
        group = read(plugins.layouts)
        self._ended = ended
        self.endpoint: Endpoint = configured.endpoint(
            settings,
            Tls.of(settings.tls),
            plugins,
            secret,
            epoch,
            (group,),
            lambda channel, transports, casts: state(group, channel, transports, casts),
            rank,
        )
        # Who waits for an order, by its own name. Not by the handoff: a request that is sent twice asks for one that is
        # loading into another's blocks.
        self._waiting: dict[str, asyncio.Future[Outcome]] = {}
        self._collecting: asyncio.Task[None] | None = None
        _running.add(self)

    @property
    def contract(self) -> Contract:
        return self.endpoint.contract

    def close(self) -> None:
        _running.discard(self)
        self.endpoint.close()

    def end(self, why: str) -> None:
        log.error("%s", why)
        self.close()
        if self._ended is not None:
            self._ended()

    def offer(self, ticket: Ticket, prompt: bytes, tokens: int, table: Sequence[int], first: FirstToken) -> None:
        """Stage the cache of a prompt of `tokens` tokens, as far as there is room. Raises what keeps it from that; then
        the blocks are not needed, and whoever comes for it is told why."""
        producer = self.endpoint.producer
        try:
            producer.open(ticket, prompt, tokens)
            producer.conclude(ticket.handoff, first)
            producer.fill(ticket.handoff, [table], tokens)
        except DeeplinkError as exc:
            self.withhold(ticket.handoff, exc.reason())
            producer.abort(ticket.handoff, exc.reason())
            raise

    def settled(self, handoff: str) -> bool:
        """Whether the blocks of an offer are no longer needed. To be asked until it is so: staging may be full."""
        producer = self.endpoint.producer
        producer.pump()
        return producer.settled(handoff)

    async def staged(self, handoff: str) -> None:
        """Wait until it is settled, which is within its ticket's time."""
        while not self.settled(handoff):
            await asyncio.sleep(STAGED_LOOK)

    def abort(self, handoff: str) -> None:
        """Nobody will come for this offer any more. When this returns, its blocks are not read."""
        self.endpoint.producer.abort(handoff)

    def withhold(self, handoff: str, reason: Reason) -> None:
        """There will be no such offer; whoever comes for it is told why."""
        self.endpoint.withhold(handoff, reason)

    def refuse(self, handoff: str, reason: Reason) -> None:
        """It will not be loaded; whoever asks the control endpoint is told why."""
        self.endpoint.refuse(handoff, reason)

    def load(self, order: Order) -> asyncio.Future[Outcome]:
        """Begin to load; the future ends with the load, within its ticket's time."""
        ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting[order.request] = ended
        ended.add_done_callback(lambda _: self._waiting.pop(order.request, None))
        self.endpoint.consumer.load(order)
        if self._collecting is None or self._collecting.done():
            self._collecting = asyncio.create_task(self._collect())
        return ended

    def cancel(self, handoff: str, request: str) -> None:
        """End this request's load. When this returns, nothing is written to its blocks any more."""
        self.endpoint.consumer.cancel(handoff, request)

    async def _collect(self) -> None:
        while self._waiting:
            for outcome in self.endpoint.consumer.collect():
                ended = self._waiting.get(outcome.order.request)
                if ended is not None and not ended.done():
                    ended.set_result(outcome)
            await asyncio.sleep(LOOK)
