"""What is known about every engine now, and the background work that keeps it true.

Each engine is looked at every `poll` seconds and at once when a request needs it. An engine that does not
answer is down, with the reason; the next look finds it up again. A restart shows as a new epoch in the
contract.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from deeplink.config import Config
from deeplink.errors import DeeplinkError
from deeplink.router.choice import Engine, Pair, Plain, Table, choose, table
from deeplink.router.control import Control, HandoffState

CANCEL_SECONDS = 2.0
# How long an engine may be silent on its control endpoint and on a stream before the stream is given up.
# Long, because an engine under load may well miss a few looks.
PATIENCE_SECONDS = 30.0

log = logging.getLogger(__name__)


class Fleet:
    """The engines of one config. Use as an async context manager: polling runs inside it."""

    def __init__(self, config: Config, control: Control, patience: float = PATIENCE_SECONDS) -> None:
        self._patience = patience
        self._control = control
        self._poll = config.router.poll
        self._engines = {
            entry.name: Engine(entry.name, entry.url, entry.control, None, "not looked at yet")
            for entry in config.engines
        }
        self._table = table(self._engines.values())
        self._answered = dict.fromkeys(self._engines, time.monotonic())
        self._looks: dict[str, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._polling: asyncio.Task[None] | None = None
        self._load: Counter[str] = Counter()
        self._turn = 0

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

    @property
    def load(self) -> dict[str, int]:
        """Open requests by engine; engines with none are left out."""
        return {name: count for name, count in self._load.items() if count}

    async def choose(self, *, handoff: bool, avoid: frozenset[str] = frozenset()) -> Plain | Pair:
        """As `choice.choose`; where that finds nothing, all engines are looked at once more before it is
        raised."""
        try:
            return self._choose(handoff, avoid)
        except DeeplinkError:
            await self.look()
            return self._choose(handoff, avoid)

    def _choose(self, handoff: bool, avoid: frozenset[str]) -> Plain | Pair:
        self._turn += 1
        return choose(self._table, handoff=handoff, load=self._load, turn=self._turn, avoid=avoid)

    @contextmanager
    def busy(self, name: str) -> Iterator[None]:
        """Counts one open request. This is the one place where load is counted, from the choice on."""
        self._load[name] += 1
        try:
            yield
        finally:
            self._load[name] -= 1

    async def look(self, names: Iterable[str] | None = None) -> None:
        """Ask these engines (or all) for their contracts now. Never raises; bounded by the control calls'
        timeout."""
        names = tuple(self._engines if names is None else names)
        for name in names:
            if name not in self._looks:
                task = asyncio.create_task(self._look(name))
                task.add_done_callback(lambda _, name=name: self._looks.pop(name))  # type: ignore[misc]
                self._looks[name] = task
        if tasks := [self._looks[name] for name in names]:
            await asyncio.wait(tasks)

    async def state(self, engine: Engine, handoff: str) -> HandoffState | None:
        return await self._control.handoff(engine.control, handoff)

    def cancel(self, handoff: str, engines: Iterable[Engine]) -> None:
        """Cancel a handoff at these engines, in the background: the request that wants it may be cancelled
        itself."""
        for engine in engines:
            task = asyncio.create_task(self._cancel(engine, handoff))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    def silent(self, engine: Engine, heard: float = 0.0) -> str:
        """Why a call to this engine is to be given up: the engine is down, and neither its control endpoint
        nor the call (`heard`, of time.monotonic) has given a sign of life for `patience` seconds. Else ""."""
        seconds = time.monotonic() - max(self._answered[engine.name], heard)
        down = self._engines[engine.name].down
        return f"no sign of life for {seconds:.0f} s ({down})" if down and seconds >= self._patience else ""

    async def _cancel(self, engine: Engine, handoff: str) -> None:
        try:
            await asyncio.wait_for(self._control.cancel(engine.control, handoff), CANCEL_SECONDS)
        except asyncio.TimeoutError:
            log.debug("handoff %s not cancelled at %s in time", handoff, engine.name)

    async def _poll_forever(self) -> None:
        while True:
            await asyncio.sleep(self._poll)
            await self.look()

    async def _look(self, name: str) -> None:
        old = self._engines[name]
        try:
            new = replace(old, contract=await self._control.contract(old.control), down="")
            self._answered[name] = time.monotonic()
        except DeeplinkError as exc:
            new = replace(old, down=str(exc))
        if new == old:
            return
        if new.down:
            log.warning("engine %s is down: %s", name, new.down)
        elif old.down and new.contract:
            log.info("engine %s is up: role %s, epoch %s", name, new.contract.role, new.contract.epoch)
        elif new.contract:
            log.info("engine %s has a new contract, epoch %s", name, new.contract.epoch)
        self._engines[name] = new
        self._table = table(self._engines.values())
