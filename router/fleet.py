"""What is known about every engine now, and the background work that keeps it true.

Each engine is looked at every `poll` seconds and at once when a request needs it. An engine that does not answer is
down, with the reason; the next look finds it up again. A restart shows as a new epoch in the contract. Engines may come
and go while requests run: what is under way at one that is removed goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from deeplink.config import Config, EngineEntry
from deeplink.errors import ConfigError, DeeplinkError
from deeplink.kvconnector.contracts.contract import Contract
from deeplink.registry import Registry
from deeplink.router.choice import Table, table
from deeplink.router.control import Control, HandoffState, Status
from deeplink.router.engine import DEEPLINK, PLAIN, Engine, Said

if TYPE_CHECKING:
    from deeplink.router.kinds import Kind

CANCEL_SECONDS = 2.0
LOOK_SECONDS = 2.0
"""For which a request waits for a look at engines."""
# How long an engine may be silent on its control endpoint and on a stream before the stream is given up.
# Long, because an engine under load may well miss a few looks.
PATIENCE_SECONDS = 30.0
REMOVED_SECONDS = 600.0
"""The same for an engine that was removed while the call ran."""

log = logging.getLogger(__name__)


class Fleet:
    """The engines that are known. Use as an async context manager: polling runs inside it. `on_change` is called when
    an engine has come, gone or changed, and when one has said how full it is."""

    def __init__(
        self,
        config: Config,
        control: Control,
        patience: float = PATIENCE_SECONDS,
        kinds: Registry[Kind] | None = None,
    ) -> None:
        """Raises PluginError for an engine of a kind that nobody has."""
        self.kinds: Registry[Kind] = kinds if kinds is not None else Registry("kind of engine")
        for entry in config.engines:
            self._known(entry)
        self._patience = patience
        self._control = control
        self._poll = config.router.poll
        self.on_change: Callable[[], None] = lambda: None
        self._engines = {entry.name: _unseen(entry) for entry in config.engines}
        self._table = table(self._engines.values())
        self._answered = dict.fromkeys(self._engines, time.monotonic())
        self._status: dict[str, Status] = {}
        self._fullest = 0.0
        self._looks: dict[str, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._polling: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Fleet:
        await self.look()
        self._polling = asyncio.create_task(self._poll_forever())
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Cancellations that are under way get their time; nothing else is waited for."""
        if self._polling is not None:
            self._polling.cancel()
        if self._background:
            await asyncio.wait(self._background, timeout=CANCEL_SECONDS)
        for task in (*self._background, *self._looks.values()):
            task.cancel()

    @property
    def table(self) -> Table:
        return self._table

    def put(self, entry: EngineEntry) -> None:
        """An engine that is new, or reached elsewhere than before; the next look finds out about it. Raises PluginError
        if nobody has its kind."""
        self._known(entry)
        old = self._engines.get(entry.name)
        new = _unseen(entry)
        if old is not None and new == replace(old, contract=None, said=None, down=new.down, weight=new.weight):
            if old.weight == new.weight:
                return
            new = replace(old, weight=new.weight)
        else:
            self._answered[entry.name] = time.monotonic()
            self._unsaid(entry.name)
            # It is being looked for where it was.
            if (look := self._looks.pop(entry.name, None)) is not None:
                look.cancel()
        self._engines[entry.name] = new
        self._changed()

    def remove(self, name: str) -> bool:
        """False if there is no such engine. Requests that run there go on."""
        if self._engines.pop(name, None) is None:
            return False
        self._unsaid(name)
        self._changed()
        return True

    @property
    def fullest(self) -> float:
        """The most that any engine said (`use`)."""
        return self._fullest

    def use(self, name: str) -> float:
        """Which part of its KV memory an engine said requests hold, 0 to 1; 0 as long as it has not said."""
        status = self._status.get(name)
        return status.blocks.held / status.blocks.total if status and status.blocks.total > 0 else 0.0

    def answered(self, name: str) -> float:
        """When an engine was last heard of, of time.monotonic."""
        return self._answered.get(name, 0.0)

    def early(self, name: str) -> bool:
        """Whether an engine has said that a claim may be asked of it before its prefill has begun, at no cost to it."""
        status = self._status.get(name)
        return status is not None and status.early

    def cache_tokens(self, name: str) -> int:
        """How many tokens an engine's cache has room for; 0 if it is not known."""
        engine, status = self._engines.get(name), self._status.get(name)
        if engine is None or engine.contract is None or status is None:
            return 0
        return status.blocks.total * max(group.block_size for group in engine.contract.groups)

    async def look(self, names: Iterable[str] | None = None) -> None:
        """Ask these engines (or all) for their contracts now. Never raises. Whoever is not done in LOOK_SECONDS is not
        waited for any longer."""
        names = self._begin_looks(names)
        if tasks := [self._looks[name] for name in names if name in self._looks]:
            await asyncio.wait(tasks, timeout=LOOK_SECONDS)

    def _begin_looks(self, names: Iterable[str] | None = None) -> tuple[str, ...]:
        """At those that are not being looked at already."""
        names = tuple(self._engines if names is None else names)
        for name in names:
            if name not in self._looks and name in self._engines:
                self._looks[name] = task = asyncio.create_task(self._look(name))
                task.add_done_callback(partial(self._looked, name))
        return names

    async def state(self, engine: Engine, handoff: str) -> HandoffState | None:
        """None also for engines that keep no account of handoffs."""
        if engine.kind != DEEPLINK:
            return None
        return await self._control.handoff(engine.control, handoff)

    async def stage(self, engine: Engine, handoff: str, known: int, until: float) -> int | None:
        """How far the prefill of this handoff is, as `Control.stage`."""
        return await self._control.stage(engine.control, handoff, known, until)

    async def link(self, producer: Engine, consumer: Engine) -> None:
        """What their kind does for two engines before their first handoff (`kinds.Kind.link`). Raises DeeplinkError."""
        await self.kinds.get(producer.kind).link(producer, consumer, self._control)

    def cancel(self, handoff: str, engines: Iterable[Engine]) -> None:
        """Cancel a handoff at these engines, in the background: the request that wants it may be cancelled itself.
        Those that keep no account of handoffs are not asked, and so not shown the token."""
        for engine in engines:
            if engine.kind == DEEPLINK:
                self.later(self._cancel(engine, handoff))

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Goes on although the request that wants it is over. It must end by itself, and raise nothing."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def silent(self, engine: Engine, heard: float = 0.0) -> str:
        """Why a call to this engine is to be given up: the engine is down, and neither its control endpoint
        nor the call (`heard`, of time.monotonic) has given a sign of life for `patience` seconds. Else ""."""
        return silence(engine, self._engines.get(engine.name), max(self._answered[engine.name], heard), self._patience)

    async def _cancel(self, engine: Engine, handoff: str) -> None:
        try:
            await asyncio.wait_for(self._control.cancel(engine.control, handoff), CANCEL_SECONDS)
        except asyncio.TimeoutError:
            log.debug("handoff %s not cancelled at %s in time", handoff, engine.name)

    async def _said(self, engine: Engine) -> Said:
        kind = self.kinds.get(engine.kind)
        # While it stays up it is the same process, so what it said holds.
        if engine.said is None or engine.down:
            return replace(await kind.look(engine, self._control), incarnation=time.monotonic_ns())
        await kind.up(engine, self._control)
        return engine.said

    async def _poll_forever(self) -> None:
        while True:
            await asyncio.sleep(self._poll)
            self._begin_looks()  # those that are slow hold up no other

    async def _look(self, name: str) -> None:
        old = self._engines[name]
        status: Status | None = None
        try:
            if old.plain:
                await self._control.alive(old.url)
                new = replace(old, down="")
            elif old.foreign:
                new = replace(old, said=await self._said(old), down="")
            else:
                new = replace(old, contract=_of_rank(await self._control.contract(old.control), old), down="")
                status = await self._control.status(old.control)
        except DeeplinkError as exc:
            new = replace(old, down=str(exc))
        if self._engines.get(name) is not old:
            return  # it was changed meanwhile; this is about what it was
        if not new.down:
            self._answered[name] = time.monotonic()
        if status is not None and status != self._status.get(name):
            self._status[name] = status
            self._fullest = max(self.use(one) for one in self._status)
            if new == old:
                self.on_change()
        if new == old:
            return
        if new.down:
            log.warning("engine %s is down: %s", name, new.down)
        elif old.down:
            epoch = new.contract.epoch if new.contract else "unknown"
            log.info("engine %s is up: role %s, epoch %s", name, new.role, epoch)
        elif new.contract:
            log.info("engine %s has a new contract, epoch %s", name, new.contract.epoch)
        self._engines[name] = new
        self._changed()

    def _unsaid(self, name: str) -> None:
        if self._status.pop(name, None) is not None:
            self._fullest = max((self.use(one) for one in self._status), default=0.0)

    def _known(self, entry: EngineEntry) -> None:
        if entry.kind not in (DEEPLINK, PLAIN):
            self.kinds.get(entry.kind)

    def _looked(self, name: str, look: asyncio.Task[None]) -> None:
        if self._looks.get(name) is look:
            del self._looks[name]

    def _changed(self) -> None:
        self._table = table(self._engines.values(), self._table)
        self.on_change()


def silence(engine: Engine, now: Engine | None, heard: float, patience: float) -> str:
    """Why a call to `engine` is to be given up, if that is what is known of its name `now`, and it was `heard` last at
    that time of time.monotonic."""
    seconds = time.monotonic() - heard
    if now is None or now.control != engine.control:
        # Nobody looks at it any more, so only the call itself can tell.
        return f"it was removed and is silent for {seconds:.0f} s" if seconds >= REMOVED_SECONDS else ""
    if now.down and seconds >= patience:
        return f"no sign of life for {seconds:.0f} s ({now.down})"
    return ""


def _of_rank(contract: Contract, engine: Engine) -> Contract:
    """Raises ConfigError for that of another data-parallel rank than requests would name."""
    if (rank := contract.ranks[0].dp) != (engine.rank or 0):
        raise ConfigError(
            f"the control endpoint {engine.control} is that of another data-parallel rank",
            field="rank",
            ours="none" if engine.rank is None else str(engine.rank),
            theirs=str(rank),
            remedy=f"set rank = {rank} for this engine, or control to the endpoint of its rank",
        )
    return contract


def _unseen(entry: EngineEntry) -> Engine:
    return Engine(
        entry.name,
        entry.url,
        entry.control,
        None,
        "not looked at yet",
        entry.weight,
        entry.kind,
        entry.role,
        entry.settings,
        entry.bootstrap,
        entry.rank,
        events=entry.events,
        replay=entry.replay,
    )
