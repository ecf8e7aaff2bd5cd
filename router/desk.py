"""Where the process that owns the router's state hears its workers, and what it keeps for each.

A worker that is killed says nothing more: its requests count no longer, and their handoffs are cancelled at every
engine that was chosen for them.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from deeplink.errors import DeeplinkError, PeerGone
from deeplink.router import speech
from deeplink.router.admission import Admission, Need
from deeplink.router.choice import Pair, Plain
from deeplink.router.engine import Engine
from deeplink.router.fleet import Fleet
from deeplink.router.load import Hold
from deeplink.router.metrics import Metrics
from deeplink.router.recent import Recent

WATCH = 0.25
"""Seconds between two looks for what changes without being said: which block sizes engines have."""


@dataclass(eq=False)
class Grant:
    """One choice for one request, as `Recent` shows what runs."""

    need: Need
    handoff: str = ""
    prefill: str = ""
    decode: str = ""
    pair: Pair | None = None
    phase: str = "arrived"
    engines: list[Engine] = field(default_factory=list)
    holds: list[Hold] = field(default_factory=list)
    asking: asyncio.Task[None] | None = None


class Desks:
    """All workers that are connected. Made in a running loop."""

    def __init__(self, fleet: Fleet, admission: Admission, metrics: Metrics, recent: Recent) -> None:
        self.fleet = fleet
        self.admission = admission
        self.metrics = metrics
        self.recent = recent
        self.open: set[Desk] = set()
        self._said: speech.State | None = None

    def new(self) -> speech.Line:
        """The end of a connection that a worker has just made."""
        return Desk(self).line

    @property
    def state(self) -> speech.State:
        fleet = self.fleet
        engines = list(fleet.table.engines)
        names = [engine.name for engine in engines]
        return speech.State(
            engines,
            {name: fleet.answered(name) for name in names},
            [name for name in names if fleet.early(name)],
            sorted(self.admission.sizes),
        )

    def changed(self) -> None:
        """Tells every worker, before it is told anything that follows from it. How full an engine is, which changes all
        the time, is none of that; nor is when one that is up was heard of."""
        before, now = self._said, self.state
        if before is not None and (before.engines, before.early, before.sizes) == (now.engines, now.early, now.sizes):
            return
        self._said = now
        for desk in self.open:
            desk.line.send(now)

    async def watch(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(WATCH)
            self.changed()


class Desk:
    """What one worker was given."""

    def __init__(self, desks: Desks) -> None:
        self._desks = desks
        self._grants: dict[int, Grant] = {}
        self.line = _Line(self)

    def opened(self) -> None:
        self._desks.open.add(self)
        self.line.send(self._desks.state)

    def closed(self) -> None:
        """It has ended, well or not; one that ends well has nothing left here."""
        self._desks.open.discard(self)
        for number in list(self._grants):
            grant = self._settle(number)
            if grant.handoff:
                self._desks.fleet.cancel(grant.handoff, grant.engines)

    def hear(self, message: speech.Asked) -> None:
        desks = self._desks
        if isinstance(message, speech.Choose):
            grant = self._grants[message.grant] = Grant(message.wanted.need())
            desks.recent.live[id(grant)] = grant
            # Most need no task: there is nothing to wait for.
            if not message.avoid and (engine := desks.admission.at_once(grant.need)) is not None:
                self._plain(message.grant, grant, engine)
            else:
                grant.asking = asyncio.create_task(self._choose(message, grant))
        elif isinstance(message, speech.Reread):
            if (known := self._grants.get(message.grant)) is not None:
                known.asking = asyncio.create_task(self._reread(message, known))
        elif isinstance(message, speech.Ended):
            if (hold := self._hold(message.grant, message.seat)) is not None:
                hold.end(well=message.well)
        elif isinstance(message, speech.Prefilled):
            if (hold := self._hold(message.grant, message.seat)) is not None:
                hold.prefilled()
                self._grants[message.grant].phase = "decoding"
        elif isinstance(message, speech.Settled):
            if message.grant in self._grants:
                self._settle(message.grant)
        elif isinstance(message, speech.Handing):
            if (known := self._grants.get(message.grant)) is not None:
                known.handoff, known.phase = message.handoff, "prefilling"
        elif isinstance(message, speech.Judged):
            for engine in desks.fleet.table.engines:
                if engine.name == message.engine:
                    (desks.admission.succeeded if message.well else desks.admission.failed)(engine)
        elif isinstance(message, speech.Cancel):
            asked = {one.name: one for grant in self._of(message.handoff) for one in grant.engines}
            desks.fleet.cancel(message.handoff, [asked[name] for name in message.engines if name in asked])
        elif isinstance(message, speech.Look):
            desks.fleet.later(self._look(message))
        elif isinstance(message, speech.Link):
            desks.fleet.later(self._link(message))
        elif isinstance(message, speech.FirstByte):
            desks.metrics.first_byte(message, message.seconds)
        elif isinstance(message, speech.Over):
            desks.metrics.ended(message, message.status, message.code, message.whole)
            desks.recent.ended(message, message.status, message.code, message.first, message.whole)
        elif isinstance(message, speech.Refused):
            desks.metrics.refused(message.status, message.code)
        else:
            desks.admission.guess()

    async def _choose(self, message: speech.Choose, grant: Grant) -> None:
        try:
            choice = await self._desks.admission.choose(grant.need, frozenset(message.avoid))
        except DeeplinkError as exc:
            self.line.send(speech.Failed(message.grant, exc.reason()))
            return
        grant.asking = None
        # Nothing may run between the choice and what is taken for it.
        if isinstance(choice, Plain):
            self._plain(message.grant, grant, choice.engine)
            return
        grant.pair, grant.prefill, grant.decode = choice, choice.prefill.name, choice.decode.name
        self._take(grant, choice.prefill, prefill=True, decode=False)
        self._take(grant, choice.decode, prefill=False, decode=True)
        self.line.send(speech.Chosen(message.grant, grant.prefill, grant.decode))

    def _plain(self, number: int, grant: Grant, engine: Engine) -> None:
        grant.decode, grant.phase = engine.name, "decoding"
        self._take(grant, engine, prefill=True, decode=True)
        self.line.send(speech.Chosen(number, "", engine.name))

    async def _reread(self, message: speech.Reread, grant: Grant) -> None:
        other = None
        if grant.pair is not None:
            other = await self._desks.admission.reader(grant.pair, grant.need, frozenset(message.avoid))
        grant.asking = None
        if other is None:
            self.line.send(speech.Chosen(message.grant, "", ""))
            return
        grant.pair, grant.decode = other, other.decode.name
        self._take(grant, other.decode, prefill=False, decode=True)
        self.line.send(speech.Chosen(message.grant, grant.prefill, grant.decode))

    def _take(self, grant: Grant, engine: Engine, *, prefill: bool, decode: bool) -> None:
        grant.engines.append(engine)
        grant.holds.append(self._desks.admission.take(engine, grant.need, prefill=prefill, decode=decode))

    def _of(self, handoff: str) -> list[Grant]:
        return [grant for grant in self._grants.values() if grant.handoff == handoff]

    def _hold(self, grant: int, seat: int) -> Hold | None:
        known = self._grants.get(grant)
        return known.holds[seat] if known is not None and 0 <= seat < len(known.holds) else None

    def _settle(self, number: int) -> Grant:
        grant = self._grants.pop(number)
        if grant.asking is not None:
            grant.asking.cancel()
        for hold in grant.holds:
            hold.end()
        self._desks.recent.live.pop(id(grant), None)
        return grant

    async def _look(self, message: speech.Look) -> None:
        await self._desks.fleet.look(message.engines)
        self.line.send(speech.Done(message.call))

    async def _link(self, message: speech.Link) -> None:
        fleet = self._desks.fleet
        up = {engine.name: engine for engine in fleet.table.engines if not engine.down}
        try:
            if gone := {message.prefill, message.decode} - up.keys():
                raise PeerGone(f"engine {min(gone)} has just gone")
            await fleet.link(up[message.prefill], up[message.decode])
        except DeeplinkError as exc:
            self.line.send(speech.Done(message.call, exc.reason()))
        else:
            self.line.send(speech.Done(message.call))


class _Line(speech.Line):
    def __init__(self, desk: Desk) -> None:
        super().__init__(True, desk.hear, desk.closed)
        self._desk = desk

    def connection_made(self, transport: object) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._desk.opened()
