"""Counts of what has happened to the handoffs of one process, for whoever watches it. Plain data, for the channel."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import chain

import msgspec

from deeplink.errors import DeeplinkError, Reason

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper edges of the classes by which the duration of handoffs is counted; one more is for all that took longer."""


class Half(msgspec.Struct, frozen=True):
    """What one side of a process has under way now; staging in bytes."""

    handoffs: int
    claims: int
    capacity: int
    used: int


class Tally(msgspec.Struct):
    """All handoffs that ended alike. `code` is that of the reason, empty where there was none; `classes` counts those
    of each duration, not cumulative. `converting` are seconds spent on taking cache out of blocks or putting it into
    them, added up over threads; `early` are bytes that a producer sent off before its prefill had ended."""

    side: str
    state: str
    code: str
    count: int = 0
    tokens: int = 0
    kv_bytes: int = 0
    resumed: int = 0
    seconds: float = 0.0
    classes: list[int] = msgspec.field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    converting: float = 0.0
    early: int = 0

    @property
    def kind(self) -> tuple[str, str, str]:
        return self.side, self.state, self.code

    def add(self, tokens: int, kv_bytes: int, resumed: int, seconds: float, converting: float, early: int) -> None:
        self.count += 1
        self.tokens += tokens
        self.kv_bytes += kv_bytes
        self.resumed += resumed
        self.seconds += seconds
        self.classes[bisect_left(SECONDS, seconds)] += 1
        self.converting += converting
        self.early += early

    def plus(self, other: Tally, sign: int = 1) -> Tally:
        """Of what ended alike; with `sign` -1, without what `other` has counted."""
        return Tally(
            *self.kind,
            self.count + sign * other.count,
            self.tokens + sign * other.tokens,
            self.kv_bytes + sign * other.kv_bytes,
            self.resumed + sign * other.resumed,
            self.seconds + sign * other.seconds,
            [a + sign * b for a, b in zip(self.classes, other.classes, strict=True)],
            self.converting + sign * other.converting,
            self.early + sign * other.early,
        )


def since(before: Iterable[Tally], now: Iterable[Tally]) -> list[Tally]:
    """What has ended between two looks at one ledger, of which the second is `now`."""
    old = {tally.kind: tally for tally in before}
    new = (tally.plus(old[tally.kind], -1) if tally.kind in old else tally for tally in now)
    return [tally for tally in new if tally.count]


def added(*looks: Iterable[Tally]) -> list[Tally]:
    """What several ledgers, or one in several intervals, have counted."""
    found: dict[tuple[str, str, str], Tally] = {}
    for tally in chain(*looks):
        found[tally.kind] = found[tally.kind].plus(tally) if tally.kind in found else tally
    return list(found.values())


def code(reason: Reason | None) -> str:
    """Of a reason that a peer may have given: only codes that this release has, so that there are few of them."""
    return "" if reason is None else DeeplinkError.from_reason(reason).code
