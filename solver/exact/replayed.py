"""How busy engines may be so that requests rarely wait too long, by replaying a trace through a queue.

Formulas know a trace's arrivals by two numbers; they do not know that its rate drifts, or that requests come in
bunches. Where a trace is at hand its own arrivals and lengths go through the queue instead: for some utilisations once,
in units of the mean service time, so that the same table holds for all chips on which service is proportional.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Sequence

from deeplink.solver.exact.queueing import MOST

_GRID = tuple(round(0.1 + 0.05 * step, 2) for step in range(18))
_LONGEST = 20_000
"""Requests of a trace that are replayed, from its beginning."""


class Replayed:
    """The waits of one stream of requests: `arrivals` in seconds, ascending, and `sizes` of the work in any unit."""

    def __init__(self, arrivals: Sequence[float], sizes: Sequence[float], share: float) -> None:
        self.arrivals = list(arrivals[:_LONGEST])
        mean = sum(sizes[:_LONGEST]) / max(len(self.arrivals), 1)
        self.sizes = [size / mean for size in sizes[:_LONGEST]]
        self.share = share
        self._waits: dict[int, list[float]] = {}

    def usable(self, seconds: float, servers: int, service: float) -> float:
        """How busy `servers` may be so that the share of the requests waits no longer than `seconds`, where `service`
        is the mean of their service times."""
        waits = self._table(servers)
        wanted = seconds / service
        index = bisect_right(waits, wanted)
        if index == 0:
            return _GRID[0] * wanted / waits[0] if waits[0] > 0 else 0.0
        if index == len(waits):
            return MOST
        low, high = waits[index - 1], waits[index]
        return _GRID[index - 1] + (_GRID[index] - _GRID[index - 1]) * (wanted - low) / (high - low)

    def _table(self, servers: int) -> list[float]:
        """For each utilisation of the grid the wait that the share does not exceed, in mean service times."""
        if servers not in self._waits:
            waits: list[float] = []
            for utilisation in _GRID:
                waits.append(max([self._wait(servers, utilisation), *waits[-1:]]))
            self._waits[servers] = waits
        return self._waits[servers]

    def _wait(self, servers: int, utilisation: float) -> float:
        span = self.arrivals[-1] - self.arrivals[0] or 1.0
        work = sum(self.sizes) / servers / utilisation
        stretch = work / span
        free = [0.0] * servers
        waits = []
        first = self.arrivals[0]
        for arrival, size in zip(self.arrivals, self.sizes, strict=True):
            at = (arrival - first) * stretch
            begin = max(at, free[0])
            waits.append(begin - at)
            heapq.heapreplace(free, begin + size)
        waits.sort()
        return waits[min(len(waits) - 1, math.ceil(self.share * len(waits)) - 1)]
