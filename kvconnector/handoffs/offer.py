"""One handoff as its producer holds it: what is staged of it, who is fetching it, and how it ended."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from deeplink.errors import DeeplinkError, Reason
from deeplink.kvconnector.handoffs.channel import Channel, Part
from deeplink.kvconnector.handoffs.first_token import FirstToken
from deeplink.kvconnector.handoffs.ticket import Ticket
from deeplink.kvconnector.relayout import digest
from deeplink.kvconnector.relayout.plan import Chunk
from deeplink.kvconnector.transport.base import Link
from deeplink.kvconnector.transport.staging import Piece, Staging


@dataclass(slots=True, eq=False)
class Staged:
    """A chunk of cache group `group` in staging. `claims` have still to fetch it; `readers` are reading it now. When
    there are neither, its piece is `free` again, and nobody reads it any more. `digesting` is held while `digests` are
    computed, of which two ranks of a consumer want the same at the same time."""

    group: int
    chunk: Chunk
    piece: Piece
    claims: int = 0
    digests: tuple[digest.Sample, digest.Tiles] | None = None
    readers: int = 0
    free: bool = False
    digesting: threading.Lock = field(default_factory=threading.Lock)


@dataclass(slots=True, eq=False)
class Announced:
    """A part of a staged chunk, on its way. `last` says that the claim is done with the chunk when this has landed;
    a chunk of which the claim wants nothing is announced to nobody, and has landed at once. `early` says that it was
    sent off before prefill had ended."""

    staged: Staged
    last: bool
    number: int = -1
    part: int = -1
    digests: digest.Tiles | None = None
    length: int = 0
    landed: bool = False
    early: bool = False


@dataclass(slots=True, eq=False)
class Taking:
    """One claim, and how far it has come: it is done with the first `done` staged chunks.

    `channel` and `link` are those it is served on now. After a broken connection it has until `lost_until` (monotonic
    seconds) to come back; `broke` is then what broke it, and `flying` what was under way. `parts` are those of the
    claim as it was made last, and `tokens` are counted for each of them.
    """

    parts: tuple[Part, ...]
    done: int = 0
    channel: Channel | None = None
    link: Link | None = None
    lost_until: float | None = None
    broke: DeeplinkError | None = None
    flying: list[Announced] = field(default_factory=list)
    over: bool = False
    resumed: int = 0
    tokens: dict[int, int] = field(default_factory=dict)
    moved: int = 0
    early: int = 0
    total: int = 0
    digested: bool = True


@dataclass(slots=True)
class Offer:
    """One open handoff. Guarded by the producer's lock, except `tables`, `computed` and `converting` (seconds that
    staging has taken), which only the engine's thread writes.

    `wire` is the element type in which each cache group is staged, `ranges` the tokens of each that are offered, and
    `marks` how far each is staged. `expected` claims will come, `served` of them are over. `first` is there once it
    was sampled. `ended` is set once, with why.
    """

    ticket: Ticket
    prompt: bytes
    tokens: int
    deadline: float
    expected: int
    wire: tuple[str, ...]
    ranges: tuple[tuple[int, int], ...]
    marks: list[int]
    tables: Sequence[Sequence[int]] = ()
    computed: int = 0
    converting: float = 0.0
    staged: list[Staged] = field(default_factory=list)
    claims: dict[bytes, Taking] = field(default_factory=dict)
    served: int = 0
    first: FirstToken | None = None
    ended: Reason | None = None

    @property
    def complete(self) -> bool:
        return all(mark == stop for mark, (_, stop) in zip(self.marks, self.ranges, strict=True))

    @property
    def links(self) -> list[Link]:
        return [taking.link for taking in self.claims.values() if taking.link is not None]


def release(staged: Staged, staging: Staging) -> None:
    """One claim less wants this chunk."""
    if staged.claims > 0:
        staged.claims -= 1
        settle(staged, staging)


def let_go(staged: Staged, staging: Staging) -> None:
    """Nobody wants this chunk any more."""
    staged.claims = 0
    settle(staged, staging)


def settle(staged: Staged, staging: Staging) -> None:
    """Give the piece back once nobody wants or reads it: exactly once, whoever comes last. Under the producer's lock,
    like the two above."""
    if not staged.free and staged.claims == 0 and staged.readers == 0:
        staged.free = True
        staged.digests = None  # a long prompt has megabytes of them
        staging.release(staged.piece)
