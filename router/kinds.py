"""Kinds of engines: how one that has no contract is looked at, and how two of a kind hand a cache over.

The seam for other engines. A plugin registers an object for each kind (`deeplink_register_kinds`); `flow` decides when
what is called, and what is tried again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from deeplink.errors import DeeplinkError
from deeplink.router.body import Body
from deeplink.router.choice import Pair
from deeplink.router.chooser import Known
from deeplink.router.engine import Engine, Said
from deeplink.router.exchange import Answer, Exchange
from deeplink.router.headers import Headers
from deeplink.router.upstream import NotSent, Upstream

LINGER = 1.0
"""Seconds for which a call that nobody waits for any more goes on, where cutting it could leave a cache behind that
nobody can name: an engine that is done, and whose answer was on its way; or one that has not read its request yet."""
RANK = "x-data-parallel-rank"
Prefilling = asyncio.Task[Answer | None]


class Probe(Protocol):
    """Small bounded requests to engines, without any key of the router's."""

    async def get(self, url: str, limit: int = 64 << 10) -> tuple[int, bytes]:
        """Status, and at most `limit` + 1 bytes of the body. Raises PeerGone."""

    async def alive(self, url: str) -> None:
        """Whether the engine at `url` answers its ``/health`` well, for which it has longer. Raises PeerGone, or
        ProtocolError with the status."""

    async def post(self, url: str, body: bytes, limit: int = 64 << 10, seconds: float = 5.0) -> tuple[int, bytes]:
        """As `get`, with JSON."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What a handoff may use. `fleet.later` runs what must outlive the request."""

    fleet: Known
    upstream: Upstream
    probe: Probe


@dataclass(frozen=True, slots=True)
class Part:
    """What one engine is sent of a request, beside the client's headers."""

    body: bytes
    headers: Headers


class Handing(Protocol):
    """One handoff from one engine. Made for each try, so it may keep what it learns.

    `together`: both engines have to be asked at once, None if either way will do. `confirmed`: the decode engine's
    answer counts only once prefill has ended well. `linger`: calls are not cut at once (`LINGER`).
    """

    together: bool | None
    confirmed: bool
    linger: bool

    async def ready(self, consumer: Engine) -> None:
        """Called before anything is sent, and again for another consumer. Raises DeeplinkError."""

    def prefill(self) -> Part: ...

    def staged(self, answer: bytes) -> None:
        """The prefill engine's answer, which said 200. Raises PrefillFailed if nothing can be fetched with it."""

    def decode(self, consumer: Engine) -> Part:
        """Called right before it is sent; after `staged`, unless both are asked at once."""

    async def offers(self, error: DeeplinkError) -> bool:
        """The consumer has failed with this. Whether what was prefilled is there for another one, for certain."""

    def over(self, prefilling: Prefilling, finished: bool) -> None:
        """The request has ended, well or not; `prefilling` may still run. Leaves nothing behind. Does not wait."""


class Kind(Protocol):
    """All engines of one kind."""

    async def look(self, engine: Engine, probe: Probe) -> Said:
        """What the engine says of itself; called when it was down before. Raises DeeplinkError if it is not up."""

    async def up(self, engine: Engine, probe: Probe) -> None:
        """Called every `router.poll` seconds. Raises DeeplinkError if it is not up."""

    async def link(self, producer: Engine, consumer: Engine, probe: Probe) -> None:
        """What two engines have to be told before they can hand over, once for both. Called through `Known.link` in the
        one process that looks at engines, however many serve. Raises DeeplinkError."""

    def obstacle(self, body: Body, *, chat: bool) -> str:
        """Which field keeps this request from being handed over; "" if none does."""

    def hand(self, exchange: Exchange, pair: Pair, until: float, tools: Tools) -> Handing:
        """`until` is the deadline, of time.monotonic."""


def rank_header(engine: Engine) -> Headers:
    """Tells a server with several data-parallel ranks behind one address which is meant."""
    return [] if engine.rank is None else [(RANK, str(engine.rank))]


async def settled(prefilling: Prefilling) -> bool:
    """Waits a little for a prefill that nobody needs, then cuts it. Whether it has ended well, so that a cache is kept
    somewhere."""
    await asyncio.wait({prefilling}, timeout=LINGER)
    if not prefilling.done():
        prefilling.cancel()
        return False
    return not prefilling.cancelled() and prefilling.exception() is None and prefilling.result() is None


def not_seen(error: DeeplinkError) -> bool:
    """Whether the engine that failed has certainly seen nothing of the request."""
    return isinstance(error.__cause__, NotSent)
