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
from deeplink.router.shared import Shared

LOOK = 0.2
"""Seconds between two looks for engines that have fallen silent."""

log = logging.getLogger(__name__)


class Heartbeat(EngineEntry):
    """Where an engine is, its epoch, and how many seconds this holds; it says it again well before."""

    epoch: Annotated[str, Field(min_length=1, max_length=256)]
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
        if beat.name not in known:
            log.info("engine %s has registered at %s", beat.name, beat.url)
        self._until[beat.name] = time.monotonic() + beat.seconds
        self._epochs[beat.name] = beat.epoch
        self._fleet.put(beat.entry)
        self._shared.put(beat.entry, beat.seconds)
        engine = known.get(beat.name)
        epoch = engine.contract.epoch if engine is not None and engine.contract is not None else ""
        if engine is None or engine.down or (engine.kind == DEEPLINK and epoch != beat.epoch):
            await self._fleet.look((beat.name,))

    def _heard_elsewhere(self, name: str, seconds: float) -> None:
        if name in self._until:
            self._until[name] = max(self._until[name], time.monotonic() + seconds)

    def leave(self, name: str, epoch: str | None = None) -> bool:
        """The engine says that it goes. False if it had not registered, or if another of its incarnations than `epoch`
        has registered meanwhile."""
        if name not in self._until or epoch not in (None, self._epochs[name]):
            return False
        del self._until[name], self._epochs[name]
        self._fleet.remove(name)
        self._shared.remove(name)
        log.info("engine %s has left", name)
        return True

    async def watch(self) -> None:
        """Until it is cancelled: engines that have fallen silent are removed."""
        while True:
            await asyncio.sleep(LOOK)
            now = time.monotonic()
            for name in [name for name, until in self._until.items() if until <= now]:
                log.warning("engine %s has not been heard of in time", name)
                self.leave(name)
