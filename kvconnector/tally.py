"""Counts of what has happened to the handoffs of one process, for whoever watches it. Plain data, for the channel."""

from __future__ import annotations

from bisect import bisect_left

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
    of each duration, not cumulative."""

    side: str
    state: str
    code: str
    count: int = 0
    tokens: int = 0
    kv_bytes: int = 0
    resumed: int = 0
    seconds: float = 0.0
    classes: list[int] = msgspec.field(default_factory=lambda: [0] * (len(SECONDS) + 1))

    def add(self, tokens: int, kv_bytes: int, resumed: int, seconds: float) -> None:
        self.count += 1
        self.tokens += tokens
        self.kv_bytes += kv_bytes
        self.resumed += resumed
        self.seconds += seconds
        self.classes[bisect_left(SECONDS, seconds)] += 1


def code(reason: Reason | None) -> str:
    """Of a reason that a peer may have given: only codes that this release has, so that there are few of them."""
    return "" if reason is None else DeeplinkError.from_reason(reason).code
