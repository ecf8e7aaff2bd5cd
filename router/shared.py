"""What several routers share through Redis: engines that registered or were added, who is draining, and the load.

Needs `pip install 'deeplink[redis]'` and `router.redis`; a router without it has all it needs. Everything goes through
memory first: nothing a request does waits for Redis. While Redis cannot be reached each router goes on with what it
knows, counts only its own load, and says so; what it has to tell is told when Redis is back.

Redis is three hashes: `engines` and `draining` by the engine's name, `load` by the router's. Times of other hosts are
not compared: a value that does not change any more is old. Values carry a MAC, as whoever can name an engine is sent
prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from pydantic import ValidationError

from deeplink import secret as shared_secret
from deeplink.config import EngineEntry
from deeplink.errors import ConfigError, PluginError
from deeplink.router.admission import Admission
from deeplink.router.fleet import Fleet

TICK = 0.25
"""Seconds between two looks."""
SETTLE = 5.0
"""Seconds in which all routers tell again what a Redis that was away may have lost."""
STALE = 3.0
"""Seconds after which a router that says nothing new is taken to have no load."""
FORGET = 60.0
"""Seconds after which what such a router left in Redis is removed."""
CALL_SECONDS = 1.0
LAST = 1 << 62
"""Later than all that an engine says."""
MAX_VALUE = 64 << 10
MAX_VALUES = 10_000
_MAC = 32

log = logging.getLogger(__name__)

Counts = dict[str, tuple[int, int, int]]


class _Engine(msgspec.Struct, frozen=True):
    """`beat` counts up with every sign of life; `seconds` is how long one holds, 0 for ever. `epoch` and `sequence` say
    which of the things that an incarnation said is the later one, whoever heard it; `left`: that it goes."""

    entry: dict[str, Any]
    seconds: float
    beat: int
    epoch: str = ""
    sequence: int = 0
    left: bool = False


@dataclass(slots=True)
class _Seen:
    """A value of another, and when it last changed."""

    raw: bytes
    at: float


@dataclass
class Shared:
    """Use `run` in a task. Without an address nothing is shared and nothing is done. `on_heard` is called when another
    router has heard of an engine that this one had heard of too, with the seconds for which that holds."""

    address: str
    secret: bytes
    fleet: Fleet
    admission: Admission
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    reached: bool = False

    def __post_init__(self) -> None:
        self._key = shared_secret.derive(self.secret, "shared")
        self._own: dict[str, _Engine] = {}
        self._told: dict[str, bytes | None] = {}
        self._drains: dict[str, bool] = {}
        self._seen: dict[tuple[str, str], _Seen] = {}
        self._theirs: set[str] = set()
        self._drained: set[str] = set()
        self._gone: list[str] = []
        self._beat = 0
        self._settling = 0.0
        self._ours_draining: set[str] = set()
        self._left: dict[str, tuple[_Engine, float]] = {}
        self.on_heard: Callable[[str, float], None] = lambda name, seconds: None
        self.on_left: Callable[[str], None] = lambda name: None
        self._client = _client(self.address) if self.address else None

    # What this router has to tell; each is known here already.

    def put(self, entry: EngineEntry, seconds: float = 0.0, epoch: str = "", sequence: int = 0) -> None:
        """The engine is there, for as long as it says so again, or until it is removed. Not for what is `stale`."""
        self._beat += 1
        self._left.pop(entry.name, None)
        mine = self._own[entry.name] = _Engine(entry.model_dump(), seconds, self._beat, epoch, sequence)
        self._tell(entry.name, mine)

    def leave(self, name: str, epoch: str, sequence: int) -> None:
        """An incarnation has said that it goes. It stays gone, whatever it had said before and is told by others."""
        mine = self._own.pop(name, None)
        self._theirs.discard(name)
        self._beat += 1
        farewell = _Engine({}, mine.seconds if mine else 0.0, self._beat, epoch, sequence, left=True)
        self._left[name] = farewell, time.monotonic()
        self._tell(name, farewell)

    def stale(self, name: str, epoch: str, sequence: int) -> bool:
        """Whether an incarnation said this before it said that it goes."""
        farewell, _ = self._left.get(name, (None, 0.0))
        return farewell is not None and farewell.epoch == epoch and sequence <= farewell.sequence

    def _tell(self, name: str, engine: _Engine) -> None:
        self._told[name] = self._sealed(name, msgspec.msgpack.encode(engine))

    def remove(self, name: str) -> None:
        self._own.pop(name, None)
        self._theirs.discard(name)
        self._told[name] = None

    def drain(self, name: str, on: bool) -> None:
        self._drains[name] = on
        (self._ours_draining.add if on else self._ours_draining.discard)(name)

    def known(self, name: str) -> bool:
        """Whether this engine came from another router."""
        return name in self._theirs

    async def run(self) -> None:
        """Until it is cancelled."""
        if self._client is None:
            return
        try:
            while True:
                await self._tick()
                await asyncio.sleep(TICK)
        finally:
            self.admission.load.others.clear()
            with contextlib.suppress(*_failures()):
                await asyncio.wait_for(self._client.hdel("deeplink:load", self.name), CALL_SECONDS)
            await self._client.aclose()

    async def _tick(self) -> None:
        failures = _failures()
        try:
            engines, draining, load = await asyncio.wait_for(self._exchanged(), CALL_SECONDS)
        except failures as exc:
            if self.reached:
                log.warning("Redis cannot be reached; this router goes on with what it knows: %s", type(exc).__name__)
            self.reached = False
            self._forget_load()
            return
        if not self.reached:
            log.info("sharing engines and load with other routers, as %s", self.name)
            self.reached = True
            # It may have lost all it knew. What others know is told again too: nobody is removed for some seconds.
            self._settling = time.monotonic() + SETTLE
            farewells = {name: farewell for name, (farewell, _) in self._left.items()}
            for name, mine in (self._own | farewells).items():
                self._told.setdefault(name, self._sealed(name, msgspec.msgpack.encode(mine)))
            for name in self._ours_draining:
                self._drains.setdefault(name, True)
            return
        self._engines(engines)
        self._draining(draining)
        self._load(load)

    async def _exchanged(self) -> list[dict[bytes, bytes]]:
        told, drains = dict(self._told), dict(self._drains)
        assert self._client is not None
        async with self._client.pipeline(transaction=False) as pipe:
            for name, value in told.items():
                if value is None:
                    pipe.hdel("deeplink:engines", name)
                else:
                    pipe.hset("deeplink:engines", name, value)
            for name, on in drains.items():
                if on:
                    pipe.hset("deeplink:draining", name, self._sealed(name, b"1"))
                else:
                    pipe.hdel("deeplink:draining", name)
            for router in self._gone:
                pipe.hdel("deeplink:load", router)
            counts = msgspec.msgpack.encode((time.monotonic(), self.admission.load.counts()))
            pipe.hset("deeplink:load", self.name, self._sealed(self.name, counts))
            for key in ("engines", "draining", "load"):
                pipe.hgetall(f"deeplink:{key}")
            answers = await pipe.execute()
        self._gone.clear()
        for name, value in told.items():
            if self._told.get(name) == value:
                del self._told[name]
        for name, on in drains.items():
            if self._drains.get(name) == on:
                del self._drains[name]
        found: list[dict[bytes, bytes]] = answers[-3:]
        return found

    def _engines(self, found: dict[bytes, bytes]) -> None:
        present, here = set(), {engine.name for engine in self.fleet.table.engines}
        for name, value, age in self._fresh("engines", found):
            engine = self._opened(name, value, _Engine)
            if engine is None or name in self._told:
                continue
            if engine.left:
                if self._goes(name, engine, age):
                    present.add(name)
                continue
            if self.stale(name, engine.epoch, engine.sequence):
                self._tell(name, self._left[name][0])
                continue
            if engine.seconds and age > engine.seconds:
                # The router that heard of it last would have removed it, if it were still there.
                if age > 2 * engine.seconds + SETTLE:
                    self._told[name] = None
                continue
            present.add(name)
            if self._own.get(name) == engine:
                continue
            if name in self._own and engine.seconds:
                self.on_heard(name, engine.seconds - age)
            elif name in self._theirs or name not in here:
                self._put(name, engine)
        now = time.monotonic()
        for old in [name for name, (one, since) in self._left.items() if now - since > one.seconds + FORGET]:
            del self._left[old]
        if now < self._settling:
            return
        for gone in (self._theirs | self._own.keys()) - present - self._told.keys():
            self._theirs.discard(gone)
            self._own.pop(gone, None)
            self.on_left(gone)
            self.fleet.remove(gone)

    def _goes(self, name: str, farewell: _Engine, age: float) -> bool:
        """Another router has heard an engine's farewell. Whether the engine is there all the same: it has come back."""
        mine = self._own.get(name)
        if mine is not None and (mine.epoch != farewell.epoch or mine.sequence > farewell.sequence):
            self._tell(name, mine)
            return True
        if age > farewell.seconds + FORGET:
            self._told[name] = None
        elif name not in self._left or self._left[name][0] != farewell:
            self._left[name] = farewell, time.monotonic()
            if mine is not None or name in self._theirs:  # not kept for those that nobody had here
                self._own.pop(name, None)
                self._theirs.discard(name)
                self.on_left(name)
                self.fleet.remove(name)
        return False

    def _put(self, name: str, engine: _Engine) -> None:
        try:
            entry = EngineEntry.model_validate(engine.entry)
            if entry.name != name:
                raise ValueError("an entry under another name")
            self.fleet.put(entry)
        except (ValidationError, ValueError, PluginError) as exc:
            log.warning("engine %s of another router cannot be used: %s", name, type(exc).__name__)
        else:
            self._theirs.add(name)

    def _draining(self, found: dict[bytes, bytes]) -> None:
        names = {name for name, value, _ in self._fresh("draining", found) if self._open(name, value) == b"1"}
        names -= {name for name, on in self._drains.items() if not on}
        ended = self._drained - names - {name for name, on in self._drains.items() if on}
        self.admission.draining |= names
        self.admission.draining -= ended
        self._drained = names
        if ended:
            self.admission.queue.wake()

    def _load(self, found: dict[bytes, bytes]) -> None:
        total: dict[str, list[int]] = {}
        for router, value, age in self._fresh("load", found):
            if age > FORGET:
                self._gone.append(router)
            counts = None if router == self.name or age > STALE else self._opened(router, value, tuple[float, Counts])
            for name, each in (counts[1] if counts else {}).items():
                sums = total.setdefault(name, [0, 0, 0])
                for place, number in enumerate(each):
                    sums[place] += max(0, number)
        self.admission.load.others = {name: (one[0], one[1], one[2]) for name, one in total.items()}
        self.admission.queue.wake()

    def _forget_load(self) -> None:
        """Of others, once it is too old to be true."""
        now = time.monotonic()
        if all(now - seen.at > STALE for (kind, _), seen in self._seen.items() if kind == "load"):
            self.admission.load.others = {}

    def _fresh(self, kind: str, found: dict[bytes, bytes]) -> list[tuple[str, bytes, float]]:
        """Names, values, and for how many seconds each has not changed."""
        now, fresh = time.monotonic(), []
        for raw, value in list(found.items())[:MAX_VALUES]:
            name = raw.decode(errors="replace")
            seen = self._seen.get((kind, name))
            if seen is None or seen.raw != value:
                seen = self._seen[kind, name] = _Seen(value, now)
            fresh.append((name, value, now - seen.at))
        names = {name for name, _, _ in fresh}
        for old in [key for key in self._seen if key[0] == kind and key[1] not in names]:
            del self._seen[old]
        return fresh

    def _sealed(self, name: str, value: bytes) -> bytes:
        return hmac.digest(self._key, name.encode() + b"\0" + value, "sha256") + value

    def _open(self, name: str, sealed: bytes) -> bytes | None:
        value = sealed[_MAC:]
        mac = hmac.digest(self._key, name.encode() + b"\0" + value, "sha256")
        return value if len(sealed) <= MAX_VALUE and hmac.compare_digest(mac, sealed[:_MAC]) else None

    def _opened(self, name: str, sealed: bytes, kind: Any) -> Any:
        value = self._open(name, sealed)
        try:
            return None if value is None else msgspec.msgpack.decode(value, type=kind)
        except msgspec.DecodeError:
            return None


def _failures() -> tuple[type[Exception], ...]:
    """What a call to Redis may end with."""
    try:
        from redis.exceptions import RedisError
    except ImportError:
        return OSError, asyncio.TimeoutError
    return RedisError, OSError, asyncio.TimeoutError


def _client(address: str) -> Any:
    """Raises ConfigError without the library, or for what is no address."""
    try:
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError as exc:
        raise ConfigError(
            "router.redis is set, but the client is not installed",
            field="router.redis",
            remedy="pip install 'deeplink[redis]'",
        ) from exc
    make: Callable[..., Any] = Redis.from_url
    try:
        return make(
            address,
            socket_timeout=CALL_SECONDS,
            socket_connect_timeout=CALL_SECONDS,
            retry=Retry(NoBackoff(), 0),
        )
    except ValueError as exc:
        raise ConfigError(f"no address of a Redis: {exc}", field="router.redis") from exc
