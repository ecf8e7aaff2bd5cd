"""Which calls make one request: one engine (plain), or prefill in one and decode in another (handoff).

    arrived -> prefilling -> decoding -> done          a plain request starts with decoding

Nothing is sent to the client before the decoding engine's first bytes are here and are not an error, so until
then every failure is an HTTP status with a typed error. A handoff that does not reach done is cancelled on
both engines, in the background, whatever ended it: a failure, a deadline, or the client leaving (which
cancels the task).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

from deeplink.errors import DecodeFailed, DeeplinkError, PrefillFailed, RouteError, TicketRefused
from deeplink.kvconnector import ticket as tickets
from deeplink.router import body as bodies
from deeplink.router.call import Opened, ask, relay
from deeplink.router.choice import Engine, Pair
from deeplink.router.exchange import Answer, Exchange
from deeplink.router.fleet import Fleet
from deeplink.router.headers import to_client
from deeplink.router.upstream import Lost, NotSent, Upstream

MAX_QUOTE = 300


class Flow:
    """Serves requests with the engines of a fleet. `deadline` is in seconds, from prefill's start to the KV
    being loaded; how long decoding takes after that is the engine's and the client's business."""

    def __init__(self, fleet: Fleet, upstream: Upstream, secret: bytes, deadline: float) -> None:
        self._fleet = fleet
        self._upstream = upstream
        self._secret = secret
        self._deadline = deadline

    @asynccontextmanager
    async def serve(self, exchange: Exchange) -> AsyncIterator[Answer]:
        """The answer, while the context lasts. Raises DeeplinkError only on entering.

        What an engine's restart or a refused connection spoilt is tried once more with fresh contracts.
        """
        async with AsyncExitStack() as stack:
            try:
                answer = await stack.enter_async_context(self._attempt(exchange, frozenset()))
            except DeeplinkError as error:
                if not _stale(error):
                    raise
                avoid = {exchange.prefill if isinstance(error, PrefillFailed) else exchange.decode}
                await self._fleet.look()
                answer = await stack.enter_async_context(self._attempt(exchange, frozenset(avoid)))
            yield answer

    @asynccontextmanager
    async def _attempt(self, exchange: Exchange, avoid: frozenset[str]) -> AsyncIterator[Answer]:
        whole = not bodies.obstacle(exchange.body, chat=exchange.chat)
        choice = await self._fleet.choose(handoff=whole, avoid=avoid)
        serving = self._handoff(exchange, choice) if isinstance(choice, Pair) else self._plain(exchange, choice.engine)
        async with serving as answer:
            yield answer

    @asynccontextmanager
    async def _plain(self, exchange: Exchange, engine: Engine) -> AsyncIterator[Answer]:
        exchange.handoff, exchange.prefill, exchange.decode = "", "", engine.name
        exchange.phase = "decoding"
        with self._fleet.busy(engine.name):
            async with self._decoded(exchange, engine, exchange.body.raw) as answer:
                yield answer

    @asynccontextmanager
    async def _handoff(self, exchange: Exchange, pair: Pair) -> AsyncIterator[Answer]:
        producer, consumer = pair.prefill, pair.decode
        exchange.handoff = tickets.new_handoff()
        exchange.prefill, exchange.decode = producer.name, consumer.name
        exchange.phase = "prefilling"
        ticket = self._ticket(exchange.handoff, pair)
        until = time.monotonic() + self._deadline
        with self._fleet.busy(consumer.name):
            try:
                with self._fleet.busy(producer.name):
                    early = await self._prefilled(exchange, producer, ticket, until)
                if early is not None:
                    yield early
                    return
                exchange.phase = "decoding"
                body = bodies.decode(exchange.body, ticket)
                async with self._decoded(exchange, consumer, body, producer, until) as answer:
                    yield answer
            finally:
                self._release(exchange, producer, consumer)

    def _release(self, exchange: Exchange, producer: Engine, consumer: Engine) -> None:
        """Leaves nothing behind of a handoff that did not reach its end."""
        if exchange.phase == "prefilling":
            self._fleet.cancel(exchange.handoff, (producer,))
        elif exchange.phase != "done":
            self._fleet.cancel(exchange.handoff, (producer, consumer))

    def _ticket(self, handoff: str, pair: Pair) -> str:
        producer, consumer = pair.prefill.contract, pair.decode.contract
        assert producer is not None
        assert consumer is not None
        milliseconds = min(max(1, int(self._deadline * 1000)), 86_400_000)
        return tickets.mint(tickets.issue(handoff, producer, consumer, pair.agreement, milliseconds), self._secret)

    async def _prefilled(self, exchange: Exchange, engine: Engine, ticket: str, until: float) -> Answer | None:
        """Runs the prefill. None if it is done; an answer if the client's request was not to the engine's
        liking."""

        async def late() -> None:
            failure = PrefillFailed(f"engine {engine.name} did not prefill within {self._deadline:g} s")
            raise await self._explained(failure, exchange.handoff, (engine,))

        body = bodies.prefill(exchange.body, ticket, chat=exchange.chat)
        try:
            opened = await ask(self._upstream, self._fleet, engine, exchange, body, until, late)
        except NotSent as exc:
            raise PrefillFailed(f"engine {engine.name}: {exc}") from exc
        except Lost as exc:
            failure = PrefillFailed(f"engine {engine.name}: {exc}")
            raise await self._explained(failure, exchange.handoff, (engine,)) from exc
        opened.reply.close()
        if 400 <= opened.reply.status < 500:
            return _whole(opened)
        if not opened.ok or opened.fault():
            failure = PrefillFailed(_complaint(engine, opened))
            raise await self._explained(failure, exchange.handoff, (engine,))
        return None

    @asynccontextmanager
    async def _decoded(
        self,
        exchange: Exchange,
        engine: Engine,
        body: bytes,
        producer: Engine | None = None,
        until: float | None = None,
    ) -> AsyncIterator[Answer]:
        """The answer of the engine that decodes; `producer` is set when it gets its cache from there."""
        sides = (engine, producer) if producer else ()

        async def late() -> None:
            state = await self._fleet.state(engine, exchange.handoff)
            if state is not None and state.state == "loaded":
                return
            failure = DecodeFailed(
                f"engine {engine.name} did not load the KV cache within {self._deadline:g} s of the start"
            )
            raise await self._explained(failure, exchange.handoff, sides)

        try:
            opened = await ask(self._upstream, self._fleet, engine, exchange, body, until, late)
        except NotSent as exc:
            raise DecodeFailed(f"engine {engine.name}: {exc}") from exc
        except Lost as exc:
            failure = DecodeFailed(f"engine {engine.name}: {exc}")
            raise await self._explained(failure, exchange.handoff, sides) from exc
        try:
            if (opened.ok and opened.fault()) or (producer and opened.reply.status >= 500):
                failure = DecodeFailed(_complaint(engine, opened))
                told = await self._explained(failure, exchange.handoff, sides)
                if told is not failure or (refused := opened.client_error()) is None:
                    raise told
                yield Answer(refused[0], [("Content-Type", "application/json")], refused[1])
            elif opened.events is None:
                if opened.ok:
                    exchange.phase = "done"
                yield _whole(opened)
            else:
                stream = relay(exchange, self._fleet, engine, opened)
                async with aclosing(stream):
                    yield Answer(200, to_client(opened.reply.headers), stream)
        finally:
            opened.reply.close()

    async def _explained(self, failure: RouteError, handoff: str, engines: Iterable[Engine]) -> DeeplinkError:
        """The reason an engine has for the failed handoff, as the error it raised there; else `failure`."""
        for engine in engines:
            state = await self._fleet.state(engine, handoff)
            if state is not None and state.reason is not None:
                return DeeplinkError.from_reason(state.reason)
        return failure


def _stale(error: DeeplinkError) -> bool:
    """Whether fresh contracts, or another engine, may make the same request succeed: an engine was restarted,
    or it was not there at all. Anything else has cost a prefill and would again."""
    if isinstance(error, TicketRefused):
        return error.field == "epoch"
    return isinstance(error.__cause__, NotSent)


def _whole(opened: Opened) -> Answer:
    return Answer(opened.reply.status, to_client(opened.reply.headers), opened.data)


def _complaint(engine: Engine, opened: Opened) -> str:
    if opened.ok:
        return f"engine {engine.name} answered with {opened.fault()}"
    quote = opened.data[:MAX_QUOTE].decode(errors="replace").strip()
    return f"engine {engine.name} answered {opened.reply.status}" + (f": {quote}" if quote else "")
