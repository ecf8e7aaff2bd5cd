"""The life of one handoff, as each side sees it, and the ledger both keep.

    producer:  filling -> staged -> drained | aborted | expired | failed
    consumer:  receiving -> loaded | failed

A record says where a handoff is and, once it has ended, why. Ended records are kept for a while, so that the router
can ask after the fact and a ticket cannot be replayed.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Literal

import msgspec

from deeplink.errors import Reason
from deeplink.kvconnector.handoffs.tally import Tally, code

KEPT = 4096
"""Ended records kept per engine."""

Side = Literal["producer", "consumer"]
FINAL = frozenset({"drained", "aborted", "expired", "failed", "loaded"})

NOT_BEGUN, BEGUN, COMPLETE = 0, 1, 2
"""How far a prefill is: nothing is staged yet, something is, or there is nothing more to wait for (all is computed, or
the handoff has ended in whichever way)."""


class Record(msgspec.Struct, frozen=True):
    """What can be told about one handoff.

    `tokens` and `kv_bytes` count what was moved (so far), over all claims; `milliseconds` runs from the claim
    (consumer) or the opening (producer) to the end; `digest` is the sum of the tile digests of what was moved, 16
    hex digits; `resumed` counts how often it went on after a broken link.
    """

    handoff: str
    side: Side
    state: str
    reason: Reason | None = None
    tokens: int = 0
    kv_bytes: int = 0
    milliseconds: float = 0.0
    digest: str = ""
    resumed: int = 0


_WORST = ("failed", "expired", "aborted", "filling", "receiving", "staged", "drained", "loaded")


def merged(records: Sequence[Record]) -> Record:
    """One record for what the ranks of an engine have of a handoff; there is at least one.

    It has ended well when it has on every rank, and its digest is the sum of theirs.
    """
    worst = min(records, key=lambda record: _WORST.index(record.state))
    digests = [int(record.digest, 16) for record in records if record.digest]
    return msgspec.structs.replace(
        worst,
        tokens=max(record.tokens for record in records),
        kv_bytes=sum(record.kv_bytes for record in records),
        milliseconds=max(record.milliseconds for record in records),
        digest=f"{sum(digests) & (1 << 64) - 1:016x}" if digests else "",
        resumed=sum(record.resumed for record in records),
    )


class Ledger:
    """Every handoff of one process, open and ended. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, tuple[Record, float]] = {}
        self._ended: OrderedDict[str, Record] = OrderedDict()
        self.ended_by_state: Counter[str] = Counter()
        self._tallies: dict[tuple[str, str, str], Tally] = {}
        self._late = 0

    def begin(self, handoff: str, side: Side, state: str) -> bool:
        """False when this handoff is known already: one incarnation handles an id once."""
        with self._lock:
            if handoff in self._open or handoff in self._ended:
                return False
            self._open[handoff] = (Record(handoff, side, state), time.monotonic())
            return True

    def enter(self, handoff: str, state: str) -> None:
        with self._lock:
            if handoff in self._open:
                record, began = self._open[handoff]
                self._open[handoff] = (msgspec.structs.replace(record, state=state), began)

    def end(
        self,
        handoff: str,
        state: str,
        reason: Reason | None = None,
        *,
        tokens: int = 0,
        kv_bytes: int = 0,
        digest: int | None = None,
        resumed: int = 0,
        converting: float = 0.0,
        early: int = 0,
    ) -> bool:
        """Close a record. False when it had ended already: a late notice changes nothing. `converting` and `early` are
        those of `Tally`."""
        with self._lock:
            if handoff not in self._open:
                self._late += 1
                return False
            record, began = self._open.pop(handoff)
            seconds = time.monotonic() - began
            self._ended[handoff] = msgspec.structs.replace(
                record,
                state=state,
                reason=reason,
                tokens=tokens,
                kv_bytes=kv_bytes,
                milliseconds=seconds * 1000,
                digest="" if digest is None else f"{digest:016x}",
                resumed=resumed,
            )
            self.ended_by_state[state] += 1
            kind = record.side, state, code(reason)
            self._tallies.setdefault(kind, Tally(*kind)).add(tokens, kv_bytes, resumed, seconds, converting, early)
            while len(self._ended) > KEPT:
                self._ended.popitem(last=False)
            return True

    def get(self, handoff: str) -> Record | None:
        with self._lock:
            if handoff in self._open:
                return self._open[handoff][0]
            return self._ended.get(handoff)

    @property
    def open(self) -> int:
        with self._lock:
            return len(self._open)

    def too_late(self) -> None:
        """Count a notice that was ignored, because the handoff it is about had ended: a second end, a claim or the end
        of one, an abort."""
        with self._lock:
            self._late += 1

    def tallies(self) -> tuple[Tally, ...]:
        """What has ended, by how and why: copies, which stay as they are."""
        with self._lock:
            copies = (msgspec.structs.replace(tally, classes=list(tally.classes)) for tally in self._tallies.values())
            return tuple(copies)

    def open_of(self, side: Side) -> int:
        with self._lock:
            return sum(record.side == side for record, _ in self._open.values())

    @property
    def late(self) -> int:
        with self._lock:
            return self._late
