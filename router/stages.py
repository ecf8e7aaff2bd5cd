"""The two stages of a request: what an engine's answer to each means, and whose doing a failure is.

An engine's own answer carries no reason for a failed handoff, so its control endpoint is asked for it; a failure that
nobody explains counts against the engine that was called.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, replace

from deeplink.errors import DecodeFailed, DeeplinkError, PrefillFailed, RouteError
from deeplink.router import usage
from deeplink.router.call import MAX_ANSWER, Calls, Opened, Relay
from deeplink.router.chooser import Chooser, Known
from deeplink.router.engine import Engine
from deeplink.router.exchange import Answer, Deliver, Exchange
from deeplink.router.headers import texts, to_client
from deeplink.router.kinds import Handing, Part
from deeplink.router.load import Hold
from deeplink.router.retry import UNAVAILABLE, UNSERVED, TurnedAway
from deeplink.router.upstream import Lost, NotSent, Reply, Upstream

MAX_QUOTE = 300


@dataclass(frozen=True, slots=True)
class Handed:
    """Where a decode engine gets its cache from: by when (of time.monotonic), the prefill, if that still runs, and how
    it is handed over."""

    producer: Engine
    until: float
    prefilling: asyncio.Task[Answer | None] | None
    handing: Handing


class Stages:
    """Calls engines for `Flow`. `deadline` is only said in messages."""

    def __init__(self, fleet: Known, admission: Chooser, upstream: Upstream, deadline: float) -> None:
        self._fleet = fleet
        self._admission = admission
        self._calls = Calls(upstream, fleet)
        self._deadline = deadline

    async def prefill(self, exchange: Exchange, engine: Engine, handing: Handing, until: float) -> Answer | None:
        """Runs the prefill. None if it is done; an answer if the client's request was not to the engine's liking."""

        async def late() -> None:
            failure = PrefillFailed(f"engine {engine.name} did not prefill within {self._deadline:g} s")
            raise await self._explained(failure, exchange.handoff, engine, (engine,))

        try:
            opened = await self._calls.ask(engine, exchange, handing.prefill(), until, late)
        except NotSent as exc:
            self._admission.failed(engine)
            raise PrefillFailed(f"engine {engine.name}: {exc}") from exc
        except Lost as exc:
            failure = PrefillFailed(f"engine {engine.name}: {exc}")
            raise await self._explained(failure, exchange.handoff, engine, (engine,)) from exc
        opened.reply.close()
        if 400 <= opened.reply.status < 500:
            return _whole(opened)
        if not opened.ok or opened.fault():
            failure = PrefillFailed(_complaint(engine, opened))
            raise await self._explained(failure, exchange.handoff, engine, (engine,))
        try:
            handing.staged(opened.data)
        except PrefillFailed:
            self._admission.failed(engine)
            raise
        self._admission.succeeded(engine)
        exchange.cached = usage.details(opened.data)
        return None

    def begin(self, exchange: Exchange, engine: Engine) -> Reply:
        """Asks an engine for all of a request, and waits for nothing."""
        return self._calls.begin(engine, exchange)

    def well(self, reply: Reply, engine: Engine) -> bytes | None:
        """The body of the whole answer, if that is one about which nothing need be said; else it is for `decode`."""
        heading = reply.heading
        if heading.status != 200 or not heading.framed or heading.streams:
            return None
        data = reply.whole()
        if not data or data.isspace() or len(data) > MAX_ANSWER:
            return None
        self._calls.done(reply)
        self._admission.succeeded(engine)
        return data

    async def decode(
        self,
        exchange: Exchange,
        engine: Engine,
        part: Part,
        hold: Hold,
        deliver: Deliver,
        handed: Handed | None = None,
        reply: Reply | None = None,
    ) -> None:
        """Delivers the answer of the engine that decodes; `handed` is set when it gets its cache from another, `reply`
        when it was asked already (`begin`). Raises DeeplinkError only before it delivers, also what the prefill that
        still runs raises."""
        sides = (engine, handed.producer) if handed else ()

        async def late() -> None:
            state = await self._fleet.state(engine, exchange.handoff)
            if state is not None and state.state == "loaded":
                return
            failure = DecodeFailed(
                f"engine {engine.name} did not load the KV cache within {self._deadline:g} s of the start"
            )
            raise await self._explained(failure, exchange.handoff, engine, sides)

        until = handed.until if handed else None
        fade = self._fleet.later if handed and handed.handing.linger else None
        if reply is not None:
            asking = self._calls.opened(reply)
        else:
            asking = self._calls.ask(engine, exchange, part, until, late if handed else None, fade)
        try:
            if handed is not None and handed.prefilling is not None:
                opened = await _beside(asking, handed)
                if isinstance(opened, Answer):
                    await deliver(opened)
                    return
            else:
                opened = await asking
        except NotSent as exc:
            self._admission.failed(engine)
            raise DecodeFailed(f"engine {engine.name}: {exc}") from exc
        except Lost as exc:
            failure = DecodeFailed(f"engine {engine.name}: {exc}")
            raise await self._explained(failure, exchange.handoff, engine, sides) from exc
        exchange.phase = "decoding"
        hold.prefilled()
        try:
            await deliver(await self._judged(exchange, engine, opened, sides))
        finally:
            opened.reply.close()
            hold.end(well=exchange.finished)

    async def _judged(self, exchange: Exchange, engine: Engine, opened: Opened, sides: Iterable[Engine]) -> Answer:
        status = opened.reply.status
        if (opened.ok and exchange.generates and opened.fault()) or (sides and status >= 500):
            failure, refused = DecodeFailed(_complaint(engine, opened)), opened.client_error()
            told = await self._explained(failure, exchange.handoff, None if refused else engine, sides)
            if told is not failure or refused is None:
                raise told
            return Answer(refused[0], [("Content-Type", "application/json")], refused[1])
        if status >= 500 and status not in UNSERVED:
            self._admission.failed(engine)
        else:
            self._admission.succeeded(engine)
        if status in UNAVAILABLE or (status in UNSERVED and not exchange.generates):
            raise TurnedAway(_complaint(engine, opened), _whole(opened))
        if opened.events is None:
            if opened.ok:
                exchange.phase = "done"
            answer = _whole(opened)
            if sides and isinstance(answer.body, bytes):
                return replace(answer, body=usage.merged(answer.body, exchange.cached))
            return answer
        return Answer(200, texts(to_client(opened.reply.pairs)), Relay(exchange, engine, opened))

    async def _explained(
        self, failure: RouteError, handoff: str, called: Engine | None, engines: Iterable[Engine]
    ) -> DeeplinkError:
        """The reason an engine has for the failed handoff, as the error it raised there; else `failure`, which then
        counts against the engine that was called."""
        for engine in engines:
            state = await self._fleet.state(engine, handoff)
            if state is not None and state.reason is not None:
                return DeeplinkError.from_reason(state.reason)
        if called is not None:
            self._admission.failed(called)
        return failure


async def _beside(asking: Awaitable[Opened], handed: Handed) -> Opened | Answer:
    """The decode engine's answer while prefill runs, or prefill's, if that is an early one. Raises what fails first."""
    prefilling = handed.prefilling
    assert prefilling is not None
    task = asyncio.ensure_future(asking)
    handed_over = False
    try:
        await asyncio.wait({task, prefilling}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and (early := prefilling.result()) is not None:
            return early
        opened = await task
        # Some decode engines go on with what has come of a cache whose prefill was given up.
        if handed.handing.confirmed and opened.ok and (early := await asyncio.shield(prefilling)) is not None:
            return early
        handed_over = True
        return opened
    finally:
        if not task.done():
            task.cancel()
        elif not handed_over and not task.cancelled() and task.exception() is None:
            task.result().reply.close()


def _whole(opened: Opened) -> Answer:
    return Answer(opened.reply.status, texts(to_client(opened.reply.pairs)), opened.data)


def _complaint(engine: Engine, opened: Opened) -> str:
    if opened.ok:
        return f"engine {engine.name} answered with {opened.fault()}"
    quote = opened.data[:MAX_QUOTE].decode(errors="replace").strip()
    return f"engine {engine.name} answered {opened.reply.status}" + (f": {quote}" if quote else "")
