"""The cache of an engine that is spread over processes: what `Part` does in one, done in all of them.

The engine's process has no part of the cache. It calls its workers (`lmdeploy_deeplink.migration.worker`), each of
which has some heads of every layer, an endpoint and a channel of its own. A load has ended well when it has in each of
them; the first in which it fails ends it in all. Calls may come to a worker in another order than they were made.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any, Protocol

from deeplink.errors import DeeplinkError, Reason
from deeplink.kvconnector.contracts import contract as co
from deeplink.kvconnector.handoffs.first_token import FirstToken
from deeplink.kvconnector.handoffs.order import Order, Outcome
from deeplink.kvconnector.handoffs.ticket import Ticket

log = logging.getLogger("lmdeploy.deeplink")


class Workers(Protocol):
    """An engine's processes with its cache, in the order of their ranks."""

    def call(self, method: str, *arguments: Any) -> list[Awaitable[Any]]:
        """Call it in each of them. What is awaited raises DeeplinkError where a process has gone."""

    def tell(self, method: str, *arguments: Any) -> None:
        """Call it in each of them, and do not wait."""

    def ask(self, method: str, *arguments: Any) -> None:
        """Call it in each of them; when this returns it is done, or the process has gone. Raises DeadlineExceeded."""


class Spread:
    """`contracts` are those of the workers, in the order of their ranks."""

    def __init__(self, workers: Workers, contracts: Sequence[co.Contract]) -> None:
        self._workers = workers
        self.contract = co.merged(contracts)
        self._tasks: set[asyncio.Task[Any]] = set()
        # Handoff -> what ends when all parts of it are staged.
        self._staging: dict[str, asyncio.Task[None]] = {}
        # Requests that are loading, and those of them that were cancelled, which the workers remember until then.
        self._loading: set[str] = set()
        self._cancelled: set[str] = set()

    def close(self) -> None:
        self._workers.tell("close")

    def offer(self, ticket: Ticket, prompt: bytes, tokens: int, table: Sequence[int], first: FirstToken) -> None:
        """Whoever comes for a part that cannot be offered is told why."""
        work = self._offer(ticket, prompt, tokens, table, first)
        self._staging[ticket.handoff] = self._start(work)

    def settled(self, handoff: str) -> bool:
        task = self._staging.get(handoff)
        if task is not None and not task.done():
            return False
        self._staging.pop(handoff, None)
        return True

    def abort(self, handoff: str) -> None:
        self._workers.ask("abort", handoff)

    def withhold(self, handoff: str, reason: Reason) -> None:
        self._workers.tell("withhold", handoff, reason)

    def refuse(self, handoff: str, reason: Reason) -> None:
        self._workers.tell("refuse", handoff, reason)

    def load(self, order: Order) -> asyncio.Future[Outcome]:
        self._loading.add(order.request)
        return self._start(self._load(order))

    def cancel(self, handoff: str, request: str) -> None:
        if request in self._loading:
            self._cancelled.add(request)
            self._workers.ask("cancel", handoff, request)

    async def _offer(self, ticket: Ticket, prompt: bytes, tokens: int, table: Sequence[int], first: FirstToken) -> None:
        calls = self._workers.call("offer", ticket, prompt, tokens, table, first)
        for told in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(told, DeeplinkError):
                log.warning("deeplink offers nothing, or not all, of handoff %s: %s", ticket.handoff, told)
            elif isinstance(told, BaseException):
                raise told

    async def _load(self, order: Order) -> Outcome:
        reason: Reason | None = None
        first: FirstToken | None = None
        for ended in asyncio.as_completed(self._workers.call("load", order)):
            try:
                outcome: Outcome = await ended
                why = outcome.reason
                first = first or outcome.first
            except DeeplinkError as exc:
                why = exc.reason()
            if why is not None and reason is None:
                reason = why
                self._cancelled.add(order.request)
                self._workers.tell("cancel", order.ticket.handoff, order.request)
        self._loading.discard(order.request)
        if order.request in self._cancelled:
            self._cancelled.discard(order.request)
            self._workers.tell("forget", order.request)
        return Outcome(order, reason, first)

    def _start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
