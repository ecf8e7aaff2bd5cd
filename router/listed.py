"""Following the engines and the routes that deeplink.toml lists: an edit takes effect without a restart.

Only [[engines]] and [[routes]] are followed, both of one reading, so no route is ever used with the engines of another
file. A file that cannot be read or is wrong changes nothing, and says so in the log. Engines
that came through the operators' API are not the file's to remove.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from deeplink import config as configs
from deeplink.config import Config, RouteEntry
from deeplink.errors import ConfigError, PluginError
from deeplink.router.fleet import Fleet

SECONDS = 1.0

log = logging.getLogger(__name__)


class Listed:
    """The engines and routes of one file. Without a path nothing is followed. `on_routes` is called with all routes
    when they have changed: after new engines were added, and before those that are gone are removed."""

    def __init__(self, path: Path | None, config: Config, fleet: Fleet, seconds: float = SECONDS) -> None:
        self._path = path
        self._fleet = fleet
        self._seconds = seconds
        self._names = {entry.name for entry in config.engines}
        self._routes = config.routes
        self.on_routes: Callable[[Sequence[RouteEntry]], None] | None = None
        self._seen = self._stamp()
        self._now = asyncio.Event()

    def look_now(self) -> None:
        """Read the file again even if it looks the same."""
        self._seen = None
        self._now.set()

    async def follow(self) -> None:
        """Until it is cancelled."""
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._now.wait(), self._seconds)
            self._now.clear()
            stamp = self._stamp()
            if stamp is not None and stamp != self._seen:
                self._seen = stamp
                await self._read()

    async def _read(self) -> None:
        assert self._path is not None
        try:
            config = configs.load(self._path)
        except ConfigError as exc:
            log.error("the engines and the routes stay as they are: %s", exc)
            return
        entries = config.engines
        names = {entry.name for entry in entries}
        for entry in entries:
            try:
                self._fleet.put(entry)
            except PluginError as exc:
                log.error("engine %s stays as it is: %s", entry.name, exc)
        if config.routes != self._routes:
            self._routes = config.routes
            if self.on_routes is not None:
                self.on_routes(config.routes)
            log.info("%s has %d routes", self._path, len(config.routes))
        for gone in self._names - names:
            self._fleet.remove(gone)
        log.info("%s lists %s", self._path, ", ".join(sorted(names)) or "no engine")
        self._names = names
        await self._fleet.look(names)

    def _stamp(self) -> tuple[int, int, int] | None:
        if self._path is None:
            return None
        try:
            state = self._path.stat()
        except OSError:  # an editor may be about to put it back
            return None
        return state.st_mtime_ns, state.st_size, state.st_ino
