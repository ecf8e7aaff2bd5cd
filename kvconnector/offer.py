"""One handoff as its producer holds it: what is staged of it, who is fetching it, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from deeplink.errors import Reason
from deeplink.kvconnector import digest
from deeplink.kvconnector.plan import Chunk
from deeplink.kvconnector.staging import Piece
from deeplink.kvconnector.ticket import Ticket
from deeplink.kvconnector.transport.base import Link


@dataclass(slots=True, eq=False)
class Staged:
    """A chunk in staging. `claims` have still to fetch it; `readers` are reading it now."""

    chunk: Chunk
    piece: Piece
    digests: digest.Tiles | None = None
    claims: int = 0
    readers: int = 0


@dataclass(slots=True)
class Offer:
    """One open handoff. Guarded by the producer's lock, except `table` and `computed` (engine thread only).

    `claimed` claims have begun and `served` of them are over. `ended` is set once, with why.
    """

    ticket: Ticket
    prompt: bytes
    tokens: int
    deadline: float
    table: Sequence[int] = ()
    computed: int = 0
    staged: list[Staged] = field(default_factory=list)
    claimed: int = 0
    served: int = 0
    ended: Reason | None = None
    links: set[Link] = field(default_factory=set)

    @property
    def watermark(self) -> int:
        return self.staged[-1].chunk.stop if self.staged else 0

    @property
    def complete(self) -> bool:
        return self.watermark == self.tokens
