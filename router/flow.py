"""Which calls make one request: one engine (plain), or prefill in one and decode in another (handoff).

    arrived -> prefilling -> decoding -> done          a plain request starts with decoding

Decode is asked when prefill is done, or (`router.dispatch`) both at once; then the decode engine waits for the first
chunk, and prefilling lasts until it answers.

Nothing is sent to the client before the decoding engine's first bytes are here and are not an error. Until then every
failure is an HTTP status with a typed error, or is made good by other engines: what prefill has staged is offered to
another decode engine that can fetch it, else all of it is tried again elsewhere. All tries together have one deadline.
A handoff that does not reach done is cancelled on every engine that was asked, in the background, whatever ended it: a
failure, a deadline, or the client leaving (which cancels the task).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from deeplink.config import RouterSection
from deeplink.errors import DeeplinkError
from deeplink.kvconnector import ticket as tickets
from deeplink.router import body as bodies
from deeplink.router import prefix, retry
from deeplink.router.admission import Admission, Need
from deeplink.router.choice import Engine, Pair, Plain
from deeplink.router.exchange import Answer, Exchange
from deeplink.router.fleet import Fleet
from deeplink.router.load import Hold
from deeplink.router.stages import Handed, Stages
from deeplink.router.upstream import Upstream

STAGED = ("filling", "staged")
"""States of the prefill side in which the cache can still be fetched."""


class Flow:
    """Serves requests with the engines of a fleet. The deadline runs from the first choice to the KV being loaded; how
    long decoding takes after that is the engine's and the client's business."""

    def __init__(
        self, fleet: Fleet, admission: Admission, upstream: Upstream, secret: bytes, section: RouterSection
    ) -> None:
        self._fleet = fleet
        self._admission = admission
        self._stages = Stages(fleet, admission, upstream, section.deadline)
        self._secret = secret
        self._section = section

    @asynccontextmanager
    async def serve(self, exchange: Exchange) -> AsyncIterator[Answer]:
        """The answer, while the context lasts. Raises DeeplinkError only on entering."""
        async with AsyncExitStack() as stack:
            yield await self._serve(exchange, stack)

    async def _serve(self, exchange: Exchange, stack: AsyncExitStack) -> Answer:
        need = self._need(exchange)
        # What some engine does not serve another may; that costs nothing to find out.
        exchange.tries = self._section.retries if exchange.generates else len(self._fleet.table.engines)
        choice = await self._admission.choose(need)
        until = time.monotonic() + self._section.deadline
        avoid: set[str] = set()
        while True:
            try:
                return await stack.enter_async_context(self._attempt(exchange, choice, need, until))
            except DeeplinkError as error:
                if (again := await self._again(exchange, need, choice, error, until, avoid)) is None:
                    if isinstance(error, retry.TurnedAway):
                        return error.answer
                    raise
                choice = again

    async def _again(
        self,
        exchange: Exchange,
        need: Need,
        choice: Plain | Pair,
        error: DeeplinkError,
        until: float,
        avoid: set[str],
    ) -> Plain | Pair | None:
        """What to try next, if anything may make the request succeed. `avoid` gathers whom it has failed at."""
        blamed = retry.blamed(error, choice)
        if not blamed or exchange.tries <= 0 or time.monotonic() >= until:
            return None
        # An engine that was restarted, or has seen nothing of the request, may be tried once more itself.
        anew = retry.stale(error) and not blamed <= avoid
        avoid |= blamed
        if anew:
            await self._fleet.look()
        try:
            other = await self._admission.choose(need, frozenset(avoid))
        except DeeplinkError:
            if anew:  # what was just found out says more
                raise
            return None
        if not anew and blamed <= retry.names(other):
            return None
        exchange.tries -= 1
        exchange.tried += 1
        return other

    def _need(self, exchange: Exchange) -> Need:
        body = exchange.body
        tokens = bodies.tokens(body)
        return Need(
            exchange.generates
            and not bodies.obstacle(body, chat=exchange.chat)
            and tokens >= self._section.min_prefill,
            tokens,
            bodies.output(body) if exchange.generates else 0,
            exchange.session(self._section.session_header),
            prefix.hashes(bodies.text(body)) if self._admission.reads_prompts else (),
            exchange.generates,
        )

    @asynccontextmanager
    async def _attempt(
        self, exchange: Exchange, choice: Plain | Pair, need: Need, until: float
    ) -> AsyncIterator[Answer]:
        if isinstance(choice, Pair):
            serving = self._handoff(exchange, choice, need, until)
        else:
            serving = self._plain(exchange, choice.engine, need)
        async with serving as answer:
            yield answer

    @asynccontextmanager
    async def _plain(self, exchange: Exchange, engine: Engine, need: Need) -> AsyncIterator[Answer]:
        exchange.handoff, exchange.prefill, exchange.decode = "", "", engine.name
        exchange.phase = "decoding"
        with self._admission.take(engine, need, prefill=True, decode=True) as hold:
            async with self._stages.decode(exchange, engine, exchange.body.raw, hold) as answer:
                yield answer

    @asynccontextmanager
    async def _handoff(self, exchange: Exchange, pair: Pair, need: Need, until: float) -> AsyncIterator[Answer]:
        exchange.handoff = tickets.new_handoff()
        exchange.prefill, exchange.decode = pair.prefill.name, pair.decode.name
        exchange.phase = "prefilling"
        exchange.cached = None
        exchange.asked.clear()
        ticket = self._ticket(exchange.handoff, pair, until)
        async with AsyncExitStack() as stack:
            filling = stack.enter_context(self._admission.take(pair.prefill, need, prefill=True, decode=False))
            hold = stack.enter_context(self._admission.take(pair.decode, need, prefill=False, decode=True))
            stack.callback(self._release, exchange)
            prefilling: asyncio.Task[Answer | None] | None = None
            if self._section.dispatch == "together":
                prefilling = asyncio.create_task(self._prefilled(exchange, pair, ticket, filling, until))
                prefilling.add_done_callback(_seen)
                stack.callback(self._drop, exchange, pair.prefill, prefilling)
            elif (early := await self._prefilled(exchange, pair, ticket, filling, until)) is not None:
                yield early
                return
            tried = {pair.decode.name}
            while True:
                try:
                    serving = self._consumed(exchange, pair, ticket, hold, Handed(pair.prefill, until, prefilling))
                    answer = await stack.enter_async_context(serving)
                    break
                except DeeplinkError as error:
                    if (other := await self._reader(exchange, pair, need, error, until, tried)) is None:
                        raise
                    hold.end()
                    hold = stack.enter_context(self._admission.take(other.decode, need, prefill=False, decode=True))
                    self._fleet.cancel(exchange.handoff, (pair.decode,))
                    pair = other
                    ticket = self._ticket(exchange.handoff, pair, until)
                    exchange.decode = pair.decode.name
                    tried.add(pair.decode.name)
            yield answer

    async def _reader(
        self, exchange: Exchange, pair: Pair, need: Need, error: DeeplinkError, until: float, tried: set[str]
    ) -> Pair | None:
        """Who else can fetch what was prefilled, if it is still there; a claim that was made has used it up."""
        if exchange.tries <= 0 or time.monotonic() >= until:
            return None
        if pair.decode.name not in retry.blamed(error, pair) or retry.other_epoch(error):
            return None
        if self._admission.reader(pair, need, frozenset(tried)) is None:
            return None
        state = await self._fleet.state(pair.prefill, exchange.handoff)
        if state is None or state.state not in STAGED:
            return None
        exchange.tries -= 1
        exchange.tried += 1
        return self._admission.reader(pair, need, frozenset(tried))

    def _release(self, exchange: Exchange) -> None:
        """Leaves nothing behind of a handoff that did not reach its end."""
        exchange.ends.append((exchange.prefill, exchange.decode, exchange.finished))
        if not exchange.finished:
            self._fleet.cancel(exchange.handoff, exchange.asked)

    def _drop(self, exchange: Exchange, producer: Engine, prefilling: asyncio.Task[Answer | None]) -> None:
        """The answer is complete, or will never be: nobody waits for prefill any more."""
        if not prefilling.done():
            prefilling.cancel()
            if exchange.finished:
                self._fleet.cancel(exchange.handoff, (producer,))

    def _ticket(self, handoff: str, pair: Pair, until: float) -> str:
        producer, consumer = pair.prefill.contract, pair.decode.contract
        assert producer is not None
        assert consumer is not None
        milliseconds = min(max(1, math.ceil((until - time.monotonic()) * 1000)), 86_400_000)
        return tickets.mint(tickets.issue(handoff, producer, consumer, pair.agreement, milliseconds), self._secret)

    async def _prefilled(self, exchange: Exchange, pair: Pair, ticket: str, hold: Hold, until: float) -> Answer | None:
        exchange.asked.append(pair.prefill)
        body = bodies.prefill(exchange.body, ticket, chat=exchange.chat)
        try:
            return await self._stages.prefill(exchange, pair.prefill, body, until)
        finally:
            hold.end()

    @asynccontextmanager
    async def _consumed(
        self, exchange: Exchange, pair: Pair, ticket: str, hold: Hold, handed: Handed
    ) -> AsyncIterator[Answer]:
        if handed.prefilling is None:
            exchange.phase = "decoding"
        exchange.asked.append(pair.decode)
        body = bodies.decode(exchange.body, ticket)
        async with self._stages.decode(exchange, pair.decode, body, hold, handed) as answer:
            yield answer


def _seen(task: asyncio.Task[Answer | None]) -> None:
    """It may have failed after decode did, which then told why."""
    if not task.cancelled():
        task.exception()
