"""The engines and the choice among them in a worker: what the process that owns them has said, and says when asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from itertools import count
from typing import Any

from deeplink.config import RouterSection
from deeplink.errors import DeeplinkError, NoEngine
from deeplink.registry import Registry
from deeplink.router import speech
from deeplink.router.admission import Need
from deeplink.router.choice import Pair, Plain, Table, table
from deeplink.router.control import Control, HandoffState
from deeplink.router.engine import DEEPLINK, Engine
from deeplink.router.exchange import Exchange
from deeplink.router.fleet import CANCEL_SECONDS, PATIENCE_SECONDS, silence
from deeplink.router.kinds import Kind
from deeplink.router.load import Hold, Load
from deeplink.router.policy import Policy

GONE = "the process that knows the engines has ended, and this worker ends too"


class Owner:
    """The connection to the process that owns the state. `over` is set once it has gone."""

    def __init__(self) -> None:
        self.line = speech.Line(False, self._hear, self._gone)
        self.over = asyncio.Event()
        self.said = asyncio.Event()
        self.state = speech.State([], {}, [], [])
        self.on_state: Callable[[], None] = lambda: None
        self.resolve: Callable[[str, str], Plain | Pair | None] = lambda prefill, decode: None
        self._numbers = count(1)
        self._asked: dict[int, asyncio.Future[Any]] = {}

    def number(self) -> int:
        return next(self._numbers)

    async def ask(self, number: int, message: speech.Asked) -> Any:
        """What is answered under this number; a choice is one of the engines as they are known when it comes. Raises
        DeeplinkError, also if the owner has gone. There is no deadline: the owner has its own."""
        if self.over.is_set():
            raise NoEngine(GONE)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self.line.send(message)
            return await answer
        finally:
            self._asked.pop(number, None)

    def _hear(self, message: speech.Told) -> None:
        if isinstance(message, speech.State):
            self.state = message
            self.on_state()
            self.said.set()
            return
        number = message.call if isinstance(message, speech.Done) else message.grant
        answer = self._asked.get(number)
        if answer is None or answer.done():
            return
        if isinstance(message, speech.Chosen):
            answer.set_result(self.resolve(message.prefill, message.decode))
        elif message.reason is not None:
            answer.set_exception(DeeplinkError.from_reason(message.reason))
        else:
            answer.set_result(None)

    def _gone(self) -> None:
        self.over.set()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(NoEngine(GONE))


class BorrowedFleet:
    """As `Fleet` for those who serve requests."""

    def __init__(
        self, owner: Owner, control: Control, kinds: Registry[Kind], patience: float = PATIENCE_SECONDS
    ) -> None:
        self.kinds = kinds
        self.table: Table = table(())
        self._owner = owner
        self._control = control
        self.on_change: Callable[[], None] = lambda: None
        self._patience = patience
        self._answered: dict[str, float] = {}
        self._engines: dict[str, Engine] = {}
        self._background: set[asyncio.Task[None]] = set()
        owner.on_state = self._heard
        owner.resolve = self._resolve
        self._heard()

    async def look(self, names: Iterable[str] | None = None) -> None:
        number = self._owner.number()
        await self._owner.ask(number, speech.Look(number, None if names is None else list(names)))

    async def link(self, producer: Engine, consumer: Engine) -> None:
        """The owner does it: each worker for itself would connect them again."""
        number = self._owner.number()
        await self._owner.ask(number, speech.Link(number, producer.name, consumer.name))

    async def state(self, engine: Engine, handoff: str) -> HandoffState | None:
        return await self._control.handoff(engine.control, handoff) if engine.kind == DEEPLINK else None

    async def stage(self, engine: Engine, handoff: str, known: int, until: float) -> int | None:
        return await self._control.stage(engine.control, handoff, known, until)

    def cancel(self, handoff: str, engines: Iterable[Engine]) -> None:
        """The owner does it, so that it is done although this process may be killed."""
        self._owner.line.send(speech.Cancel(handoff, [engine.name for engine in engines]))

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def silent(self, engine: Engine, heard: float = 0.0) -> str:
        last = max(self._answered.get(engine.name, 0.0), heard)
        return silence(engine, self._engines.get(engine.name), last, self._patience)

    def early(self, name: str) -> bool:
        return name in self._owner.state.early

    async def close(self) -> None:
        """What goes on in the background gets its time."""
        if self._background:
            await asyncio.wait(self._background, timeout=CANCEL_SECONDS)
        for task in self._background:
            task.cancel()

    def _heard(self) -> None:
        state, before = self._owner.state, self._engines
        self._answered |= state.answered
        # What has not changed stays the same object, which is compared at once with itself: of a large fleet each with
        # each would take long.
        self._engines = {engine.name: _kept(before.get(engine.name), engine) for engine in state.engines}
        self.table = table(self._engines.values(), self.table)
        self.on_change()

    def _resolve(self, prefill: str, decode: str) -> Plain | Pair | None:
        if prefill:
            pairs = self.table.partners.get(prefill, ())
            return next((pair for pair in pairs if pair.decode.name == decode), None)
        return Plain(self._engines[decode]) if decode in self._engines else None


def _kept(old: Engine | None, new: Engine) -> Engine:
    return old if old == new else new


class BorrowedAdmission:
    """As `Admission` for those who serve requests. `load` is what this worker has given."""

    def __init__(self, owner: Owner, fleet: BorrowedFleet, section: RouterSection, policies: Registry[Policy]) -> None:
        both = [policies.get(name) for name in (section.prefill_policy, section.decode_policy)]
        self.reads_prompts = any(policy.reads_prompts for policy in both)
        self.reads_caches = any(policy.reads_caches for policy in both)
        self.load = Load()
        self._owner = owner
        self._taken: dict[int, int] = {}
        fleet.on_change = lambda: self.load.keep({engine.name for engine in fleet.table.engines})

    @property
    def sizes(self) -> set[int]:
        return set(self._owner.state.sizes)

    def guess(self) -> None:
        self._owner.line.send(speech.Guessed())

    def at_once(self, need: Need) -> Engine | None:
        """The owner has to be asked."""

    async def choose(self, need: Need, avoid: frozenset[str] = frozenset()) -> Plain | Pair:
        self.settle(need)
        need.grant = number = self._owner.number()
        self._taken[number] = 0
        message = speech.Choose(number, speech.Wanted.of(need), list(avoid))
        choice: Plain | Pair | None = await self._owner.ask(number, message)
        if choice is None:  # the two know of different engines, which cannot be: what was said came in order
            raise NoEngine("the engine that was chosen is not known to this worker")
        return choice

    async def reader(self, pair: Pair, need: Need, avoid: frozenset[str]) -> Pair | None:
        choice: Pair | None = await self._owner.ask(need.grant, speech.Reread(need.grant, list(avoid)))
        return choice

    def take(self, engine: Engine, need: Need, *, prefill: bool, decode: bool) -> Hold:
        """The owner has counted it already; this is the end of it that is in our hands."""
        number = need.grant
        seat = self._taken[number]
        self._taken[number] = seat + 1
        tokens = need.tokens if prefill else 0, need.tokens + need.output if decode else 0
        return _Seat(self._owner.line, number, seat, self.load, engine.name, *tokens)

    def handing(self, need: Need, handoff: str) -> None:
        """Told before any engine is, so that it can be cancelled whenever this process ends."""
        self._owner.line.send(speech.Handing(need.grant, handoff))
        self._owner.line.flush()

    def settle(self, need: Need) -> None:
        if need.grant:
            self._taken.pop(need.grant, None)
            self._owner.line.send(speech.Settled(need.grant))
            need.grant = 0

    def succeeded(self, engine: Engine) -> None:
        self._owner.line.send(speech.Judged(engine.name, True))

    def failed(self, engine: Engine) -> None:
        self._owner.line.send(speech.Judged(engine.name, False))


class _Seat(Hold):
    """One request at one engine, which the owner is told about."""

    __slots__ = ("_grant", "_line", "_seat")

    def __init__(
        self, line: speech.Line, grant: int, seat: int, load: Load, name: str, prefill: int, decode: int
    ) -> None:
        self._line = line
        self._grant = grant
        self._seat = seat
        super().__init__(load.of(name), prefill, decode, _nothing)

    def prefilled(self) -> None:
        if self._open and self.prefill:
            self._line.send(speech.Prefilled(self._grant, self._seat))
        super().prefilled()

    def end(self, *, well: bool = False) -> None:
        if self._open:
            self._line.send(speech.Ended(self._grant, self._seat, well))
        super().end(well=well)


class BorrowedMetrics:
    """As `Metrics`: the owner counts."""

    def __init__(self, owner: Owner) -> None:
        self._line = owner.line

    def first_byte(self, exchange: Exchange, seconds: float) -> None:
        self._line.send(speech.FirstByte(exchange.kind, seconds))

    def refused(self, status: str, code: str) -> None:
        self._line.send(speech.Refused(status, code))

    def ended(self, exchange: Exchange, status: str, code: str, seconds: float) -> None:
        """Told with the rest (`BorrowedRecent`)."""


class BorrowedRecent:
    """As `Recent`."""

    def __init__(self, owner: Owner) -> None:
        self._line = owner.line

    def begun(self, exchange: Exchange) -> None:
        """The owner knows: it is asked for engines."""

    def ended(self, exchange: Exchange, status: str, code: str, first: float, whole: float) -> None:
        self._line.send(speech.Over(exchange.kind, exchange.tried, exchange.ends, status, code, first, whole))


def _nothing() -> None:
    """Whoever waits does so at the owner."""
