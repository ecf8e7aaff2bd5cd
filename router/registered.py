"""Engines that say themselves that they are there, and are there for as long as they go on saying so.

An engine is believed what it says because it knows the secret that engines and router share. What can be done with it
is in its contract, as for every engine; its epoch is only said so that a restart is seen at once. The names of engines
that the file or an operator has named are not to be had.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Annotated

from pydantic import Field

from deeplink.config import EngineEntry
from deeplink.errors import InvalidRequest
from deeplink.router.engine import DEEPLINK
from deeplink.router.fleet import Fleet
from deeplink.router.shared import LAST, Shared

LOOK = 0.2
"""Seconds between two looks for engines that have fallen silent."""

log = logging.getLogger(__name__)


class Heartbeat(EngineEntry):
    """Where an engine is, its epoch, and how many seconds this holds; it says it again well before. `sequence` counts
    what one incarnation says, for several routers may hear it in another order."""

    epoch: Annotated[str, Field(min_length=1, max_length=256)]
    sequence: Annotated[int, Field(ge=0, lt=LAST)] = 0
    seconds: Annotated[float, Field(gt=0, le=3600)] = 15.0

    @property
    def entry(self) -> EngineEntry:
        return EngineEntry(**{name: getattr(self, name) for name in EngineEntry.model_fields})


class Registered:
    """The engines of a fleet that have registered themselves."""

    def __init__(self, fleet: Fleet, shared: Shared) -> None:
        self._fleet = fleet
        self._shared = shared
        self._until: dict[str, float] = {}
        self._epochs: dict[str, str] = {}
        shared.on_heard = self._heard_elsewhere
        shared.on_left = self._forget

    async def heard(self, beat: Heartbeat) -> None:
        """Raises InvalidRequest if the name is someone else's."""
        known = {engine.name: engine for engine in self._fleet.table.engines}
        if beat.name in known and beat.name not in self._until and not self._shared.known(beat.name):
            raise InvalidRequest(
                "an engine of that name was not registered by itself",
                field="name",
                theirs=beat.name,
                remedy="register under another name",
            )
        if self._shared.stale(beat.name, beat.epoch, beat.sequence):
            raise InvalidRequest(
                "this incarnation of the engine has left",
                field="sequence",
                theirs=str(beat.sequence),
                remedy="count up what the engine says, or start it anew",
            )
        if beat.name not in known:
            log.info("engine %s has registered at %s", beat.name, beat.url)
        self._until[beat.name] = time.monotonic() + beat.seconds
        self._epochs[beat.name] = beat.epoch
        self._fleet.put(beat.entry)
        self._shared.put(beat.entry, beat.seconds, beat.epoch, beat.sequence)
        engine = known.get(beat.name)
        epoch = engine.contract.epoch if engine is not None and engine.contract is not None else ""
        if engine is None or engine.down or (engine.kind == DEEPLINK and epoch != beat.epoch):
            await self._fleet.look((beat.name,))

    def _heard_elsewhere(self, name: str, seconds: float) -> None:
        if name in self._until:
            self._until[name] = max(self._until[name], time.monotonic() + seconds)

    def leave(self, name: str, epoch: str | None = None, sequence: int | None = None) -> bool:
        """The engine says that it goes; `sequence` is the number of what it said before, all that it may have said if
        there is none. False if it had not registered, or if another of its incarnations than `epoch` has registered
        meanwhile."""
        ours = self._epochs.get(name)
        if ours is None or epoch not in (None, ours):
            return False
        self._forget(name)
        self._fleet.remove(name)
        self._shared.leave(name, ours, LAST if sequence is None else sequence)
        log.info("engine %s has left", name)
        return True

    def _forget(self, name: str) -> None:
        self._until.pop(name, None)
        self._epochs.pop(name, None)

    async def watch(self) -> None:
        """Until it is cancelled: engines that have fallen silent are removed."""
        while True:
            await asyncio.sleep(LOOK)
            now = time.monotonic()
            for name in [name for name, until in self._until.items() if until <= now]:
                log.warning("engine %s has not been heard of in time", name)
                self._forget(name)
                self._fleet.remove(name)
                self._shared.remove(name)
