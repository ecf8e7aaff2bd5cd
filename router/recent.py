"""What runs now and what ended lately, for people to look at. Nothing of what was asked or answered is kept. No IO."""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import NamedTuple

from deeplink.router.chooser import Ending, Live

WINDOW = 60.0
"""Seconds that count as lately."""
MAX_ENDED = 8192


class Ended(NamedTuple):
    """`first` is seconds to the first byte, 0 if there was none."""

    at: float
    path: str
    status: str
    first: float
    whole: float


class Recent:
    """`ends` counts handoffs by how they ended, since the router started."""

    def __init__(self) -> None:
        self.live: dict[int, Live] = {}
        self.ends: Counter[str] = Counter()
        self.flows: Counter[tuple[str, str]] = Counter()
        self._ended: deque[Ended] = deque(maxlen=MAX_ENDED)

    def begun(self, exchange: Live) -> None:
        self.live[id(exchange)] = exchange

    def ended(self, exchange: Ending, status: str, code: str, first: float, whole: float) -> None:
        self.live.pop(id(exchange), None)
        self._ended.append(Ended(time.monotonic(), exchange.kind, status, first, whole))
        for number, (prefill, decode, finished) in enumerate(exchange.ends, 1):
            self.flows[prefill, decode] += finished
            last = number == len(exchange.ends)
            self.ends["done" if finished else (code or _left(status)) if last else "tried again"] += 1

    def lately(self) -> list[Ended]:
        since = time.monotonic() - WINDOW
        return [one for one in self._ended if one.at >= since]


def _left(status: str) -> str:
    """How a handoff ended that no error of ours ended."""
    return "client left" if status == "gone" else f"engine answered {status}"


def percentile(values: list[float], share: float) -> float:
    """0 if there are no values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0
