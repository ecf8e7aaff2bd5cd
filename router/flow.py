"""Which calls make one request: one engine (plain), or prefill in one and decode in another (handoff).

    arrived -> prefilling -> decoding -> done          a plain request starts with decoding

Decode is asked when prefill is done, once there is something to fetch, or at once (`router.dispatch`); asked early, the
decode engine waits for what is still to come, and prefilling lasts until it answers.

Nothing is sent to the client before the decoding engine's first bytes are here and are not an error. Until then every
failure is an HTTP status with a typed error, or is made good by other engines: what prefill has staged is offered to
another decode engine that can fetch it, else all of it is tried again elsewhere. All tries together have one deadline.
How two engines hand over is their kind's business (`kinds`). A handoff that does not reach done leaves nothing behind
at any engine that was asked, whatever ended it: a failure, a deadline, or the client leaving (which cancels the task).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType

from deeplink.config import RouterSection
from deeplink.errors import DeadlineExceeded, DeeplinkError
from deeplink.kvconnector.handoffs import ticket as tickets
from deeplink.router import body as bodies
from deeplink.router import prefix, retry
from deeplink.router.admission import Need
from deeplink.router.choice import Pair, Plain
from deeplink.router.chooser import Chooser, Known
from deeplink.router.control import Control
from deeplink.router.engine import DEEPLINK, Engine
from deeplink.router.exchange import Answer, Deliver, Exchange
from deeplink.router.kind_deeplink import DeeplinkHanding
from deeplink.router.kinds import Handing, Part, Tools
from deeplink.router.load import Hold
from deeplink.router.prompts import Chains, Prompts
from deeplink.router.stages import Handed, Stages
from deeplink.router.upstream import Reply, Upstream

_NONE: Mapping[str, str] = MappingProxyType({})


@dataclass(slots=True)
class Begun:
    """A call that was made, and what was chosen for it."""

    need: Need
    engine: Engine
    hold: Hold
    reply: Reply

    def drop(self) -> None:
        """Nobody wants it any more. Idempotent."""
        self.reply.close()
        self.hold.end()


class Flow:
    """Serves requests with the engines of a fleet. The deadline runs from the first choice to the KV being loaded; how
    long decoding takes after that is the engine's and the client's business."""

    def __init__(
        self,
        fleet: Known,
        admission: Chooser,
        upstream: Upstream,
        control: Control,
        secret: bytes,
        section: RouterSection,
    ) -> None:
        self._fleet = fleet
        self._admission = admission
        self._stages = Stages(fleet, admission, upstream, section.deadline)
        self._tools = Tools(fleet, upstream, control)
        self._prompts = Prompts(control)
        self._secret = secret
        self._section = section

    def begin(self, exchange: Exchange) -> Begun | None:
        """Makes the first call of a request that surely needs no other; None where that is not known at once.

        The caller passes what it gets to `ended` or to `serve`.
        """
        if self._admission.reads_caches:
            return None
        need = exchange.need = self._need(exchange, None)
        engine = self._admission.at_once(need)
        if engine is None:
            return None
        exchange.phase, exchange.decode = "decoding", engine.name
        hold = self._admission.take(engine, need, prefill=True, decode=True)
        return Begun(need, engine, hold, self._stages.begin(exchange, engine))

    def ended(self, exchange: Exchange, begun: Begun) -> bytes | None:
        """The body of the answer to that call, if there is nothing more to do for it; its head is the reply's."""
        data = self._stages.well(begun.reply, begun.engine)
        if data is not None:
            exchange.phase = "done"
            begun.hold.end(well=True)
        return data

    async def serve(self, exchange: Exchange, deliver: Deliver, begun: Begun | None = None) -> None:
        """Delivers the answer. Raises DeeplinkError only if it has delivered nothing."""
        # What some engine does not serve another may; that costs nothing to find out.
        exchange.tries = self._section.retries if exchange.generates else len(self._fleet.table.engines)
        if begun is not None:
            await self._served(exchange, begun.need, Plain(begun.engine), deliver, begun)
            return
        need = exchange.need or self._need(exchange, await self._chains(exchange))
        try:
            await self._served(exchange, need, await self._admission.choose(need), deliver, None)
        finally:
            self._admission.settle(need)

    async def _served(
        self, exchange: Exchange, need: Need, choice: Plain | Pair, deliver: Deliver, begun: Begun | None
    ) -> None:
        until = time.monotonic() + self._section.deadline
        avoid: set[str] = set()
        while True:
            while isinstance(choice, Pair) and (field := self._obstacle(exchange, choice.kind)):
                # Engines of this kind came while it waited, so nobody had asked whether they could hand it over.
                need.barred = {**need.barred, choice.kind: field}
                choice = await self._admission.choose(need, frozenset(avoid))
            try:
                if isinstance(choice, Pair):
                    await self._handoff(exchange, choice, need, until, deliver)
                else:
                    await self._plain(exchange, choice.engine, need, deliver, begun)
                return
            except DeeplinkError as error:
                begun = None
                if (again := await self._again(exchange, need, choice, error, until, avoid)) is None:
                    if isinstance(error, retry.TurnedAway):
                        await deliver(error.answer)
                        return
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

    async def _chains(self, exchange: Exchange) -> Chains | None:
        """The prompt as it is looked up in what engines hold."""
        admission = self._admission
        if not admission.reads_caches or not exchange.generates:
            return None
        table = self._fleet.table
        able = [engine for engine in table.engines if engine.events and not engine.down]
        asked = min(able, key=lambda engine: admission.load.of(engine.name).requests, default=None)
        chains = await self._prompts.chains(exchange.body, asked, admission.sizes)
        if chains is None:
            admission.guess()
        return chains

    def _need(self, exchange: Exchange, chains: Chains | None) -> Need:
        body, generates = exchange.body, exchange.outgoing.generates
        tokens = bodies.tokens(body)
        return Need(
            generates and tokens >= self._section.min_prefill,
            tokens,
            bodies.output(body) if generates else 0,
            exchange.session,
            prefix.hashes(bodies.text(body)) if self._admission.reads_prompts else (),
            chains,
            self._barred(exchange) if self._fleet.table.kinds else _NONE,
            generates,
        )

    def _barred(self, exchange: Exchange) -> Mapping[str, str]:
        """The kinds of engines that could not hand this request over, and by which of its fields."""
        found = {kind: self._obstacle(exchange, kind) for kind in self._fleet.table.kinds}
        return {kind: field for kind, field in found.items() if field}

    def _obstacle(self, exchange: Exchange, kind: str) -> str:
        if not exchange.generates:
            return "path"
        if kind == DEEPLINK:
            return bodies.obstacle(exchange.body, chat=exchange.chat)
        return self._fleet.kinds.get(kind).obstacle(exchange.body, chat=exchange.chat)

    async def _plain(
        self, exchange: Exchange, engine: Engine, need: Need, deliver: Deliver, begun: Begun | None
    ) -> None:
        exchange.handoff, exchange.prefill, exchange.decode = "", "", engine.name
        exchange.phase = "decoding"
        with begun.hold if begun else self._admission.take(engine, need, prefill=True, decode=True) as hold:
            reply = begun.reply if begun else None
            await self._stages.decode(exchange, engine, Part(exchange.body.raw, []), hold, deliver, reply=reply)

    async def _handoff(self, exchange: Exchange, pair: Pair, need: Need, until: float, deliver: Deliver) -> None:
        exchange.handoff = tickets.new_handoff()
        self._admission.handing(need, exchange.handoff)
        exchange.prefill, exchange.decode = pair.prefill.name, pair.decode.name
        exchange.phase = "prefilling"
        exchange.cached = None
        exchange.asked = ()
        handing = self._hand(exchange, pair, until)
        together = self._section.dispatch == "together" if handing.together is None else handing.together
        with ExitStack() as stack:
            filling = stack.enter_context(self._admission.take(pair.prefill, need, prefill=True, decode=False))
            hold = stack.enter_context(self._admission.take(pair.decode, need, prefill=False, decode=True))
            stack.callback(exchange.handed)
            await self._ready(handing, pair, until)
            prefilling = asyncio.create_task(self._prefilled(exchange, handing, pair.prefill, filling, until))
            prefilling.add_done_callback(_seen)
            stack.callback(lambda: handing.over(prefilling, exchange.finished))
            together = together or await self._begun(handing, prefilling)
            if not together and (early := await asyncio.shield(prefilling)) is not None:
                await deliver(early)
                return
            handed = Handed(pair.prefill, until, prefilling if together else None, handing)
            tried = {pair.decode.name}
            while True:
                try:
                    await self._consumed(exchange, pair.decode, hold, deliver, handed)
                    return
                except DeeplinkError as error:
                    if (other := await self._reader(exchange, pair, need, error, until, tried, handing)) is None:
                        raise
                    hold.end()
                    hold = stack.enter_context(self._admission.take(other.decode, need, prefill=False, decode=True))
                    await self._ready(handing, other, until)
                    pair = other
                    exchange.decode = pair.decode.name
                    tried.add(pair.decode.name)

    async def _ready(self, handing: Handing, pair: Pair, until: float) -> None:
        try:
            await asyncio.wait_for(handing.ready(pair.decode), until - time.monotonic())
        except asyncio.TimeoutError as exc:
            raise DeadlineExceeded(
                f"{pair.prefill.name} and {pair.decode.name} were not connected within {self._section.deadline:g} s"
            ) from exc

    def _hand(self, exchange: Exchange, pair: Pair, until: float) -> Handing:
        if pair.kind == DEEPLINK:
            together = self._section.dispatch == "together"
            return DeeplinkHanding(exchange, pair, until, self._tools, self._secret, together)
        return self._fleet.kinds.get(pair.kind).hand(exchange, pair, until, self._tools)

    async def _begun(self, handing: Handing, prefilling: asyncio.Task[Answer | None]) -> bool:
        """Whether there is something that the decode engine can fetch before prefill is done; waits for either."""
        if self._section.dispatch != "auto" or not isinstance(handing, DeeplinkHanding):
            return False
        begun = asyncio.create_task(handing.begun())
        try:
            await asyncio.wait({prefilling, begun}, return_when=asyncio.FIRST_COMPLETED)
            return not prefilling.done() and begun.result()
        finally:
            begun.cancel()

    async def _reader(
        self,
        exchange: Exchange,
        pair: Pair,
        need: Need,
        error: DeeplinkError,
        until: float,
        tried: set[str],
        handing: Handing,
    ) -> Pair | None:
        """Who else can fetch what was prefilled, if it is still there; a claim that was made has used it up."""
        there = await handing.offers(error) if pair.decode.name in retry.blamed(error, pair) else False
        if not there or exchange.tries <= 0 or time.monotonic() >= until:
            return None
        other = await self._admission.reader(pair, need, frozenset(tried))
        if other is not None:
            exchange.tries -= 1
            exchange.tried += 1
        return other

    async def _prefilled(
        self, exchange: Exchange, handing: Handing, engine: Engine, hold: Hold, until: float
    ) -> Answer | None:
        exchange.asked += (engine,)
        try:
            return await self._stages.prefill(exchange, engine, handing, until)
        finally:
            hold.end()

    async def _consumed(self, exchange: Exchange, engine: Engine, hold: Hold, deliver: Deliver, handed: Handed) -> None:
        if handed.prefilling is None:
            exchange.phase = "decoding"
        exchange.asked += (engine,)
        part = handed.handing.decode(engine)
        await self._stages.decode(exchange, engine, part, hold, deliver, handed)


def _seen(task: asyncio.Task[Answer | None]) -> None:
    """It may have failed after decode did, which then told why."""
    if not task.cancelled():
        task.exception()
