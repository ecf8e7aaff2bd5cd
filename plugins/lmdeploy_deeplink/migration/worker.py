"""What a worker of an engine that is spread over processes does with its part of the cache, when it is called.

Each method is called by its name, by `lmdeploy_deeplink.migration.spread`; calls may come in another order than they
were made. They run on the thread that also computes, between two forwards or where one waits.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from deeplink import config as configuration
from deeplink import secret as shared
from deeplink.errors import Aborted, DeeplinkError, Reason
from deeplink.kvconnector.contracts import contract as co
from deeplink.kvconnector.handoffs.first_token import FirstToken
from deeplink.kvconnector.handoffs.order import Order, Outcome
from deeplink.kvconnector.handoffs.ticket import Ticket
from lmdeploy_deeplink.migration import adapter
from lmdeploy_deeplink.migration.adapter import Place, Stated
from lmdeploy_deeplink.migration.forwards import Forwards
from lmdeploy_deeplink.migration.part import Part

log = logging.getLogger("lmdeploy.deeplink")


class Worker:
    """`made` is its part; `forwards` are those of its model."""

    def __init__(self, made: Part, forwards: Forwards) -> None:
        self._part = made
        self._forwards = forwards
        # Requests that were cancelled, until they are forgotten: their loads may still be on their way to here.
        self._cancelled: set[str] = set()

    @property
    def contract(self) -> bytes:
        return co.encode(self._part.contract)

    async def offer(self, ticket: Ticket, prompt: bytes, tokens: int, table: Sequence[int], first: FirstToken) -> None:
        """Returns when the blocks are no longer needed."""
        try:
            self._part.offer(ticket, prompt, tokens, table, first)
        except DeeplinkError as exc:
            log.warning("deeplink offers nothing of handoff %s: %s", ticket.handoff, exc)
            return
        await self._part.staged(ticket.handoff)

    async def abort(self, handoff: str) -> None:
        self._part.abort(handoff)

    async def withhold(self, handoff: str, reason: Reason) -> None:
        self._part.withhold(handoff, reason)

    async def refuse(self, handoff: str, reason: Reason) -> None:
        self._part.refuse(handoff, reason)

    async def load(self, order: Order) -> Outcome:
        if order.request in self._cancelled:
            why = Aborted("the decode request was given up").reason()
            self._part.refuse(order.ticket.handoff, why)
            return Outcome(order, why)
        return await self._part.load(order)

    async def cancel(self, handoff: str, request: str) -> None:
        self._cancelled.add(request)
        self._part.cancel(handoff, request)

    async def forget(self, request: str) -> None:
        self._cancelled.discard(request)

    async def passed(self, sent: int, seconds: float) -> None:
        """Wait until so many forwards have ended here."""
        await self._forwards.until(sent, seconds)

    async def close(self) -> None:
        self._part.close()


def start(cache: Any, heads: int, place: Place, stated: Stated, epoch: str, forwards: Forwards) -> Worker:
    """Of a worker whose `cache` is LMDeploy's cache engine, with its share of `heads`. Raises what keeps it from that.

    What the operator has configured is read here, from the same file as in the engine's process.
    """
    loaded = configuration.load(None)
    made = Part(
        loaded.kv,
        shared.load(loaded.secret_file),
        epoch,
        lambda known: adapter.read_part(cache, heads, place, known),
        lambda group, channel, transports, casts: stated.contract(group, place, epoch, channel, transports, casts),
        place.rank,
    )
    return Worker(made, forwards)
