"""How busy engines may be so that requests rarely wait too long.

A queue with general arrivals, general service and several servers, by the approximation of Allen and Cunneen: the
chance to wait at all is that of the queue with random arrivals and service (Erlang's C), and who waits, waits
exponentially long, by the mean of that queue times (arrivals' + service's squared coefficient of variation) / 2. It is
exact for M/M/n.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

MOST = 0.95
"""Nothing is planned busier than this: what is not modelled has to fit somewhere."""
_SERVERS = 1024
"""More servers than this are counted as so many, which errs on the careful side."""
_STEP = 0.05
_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512)


@lru_cache(maxsize=1 << 16)
def erlang_c(servers: int, utilisation: float) -> float:
    """The chance that all of `servers` are busy, with random arrivals and service."""
    offered = servers * utilisation
    blocked = 1.0
    for n in range(1, servers + 1):
        blocked = offered * blocked / (n + offered * blocked)
    return blocked / (1 - utilisation * (1 - blocked))


def waits_longer(seconds: float, servers: int, utilisation: float, service: float, variation: float) -> float:
    """The part of the requests that waits longer than `seconds`. `variation` is the mean of both squared coefficients
    of variation, `service` the mean service time."""
    if utilisation >= 1:
        return 1.0
    chance = erlang_c(min(servers, _SERVERS), utilisation)
    mean = service * max(variation, 1e-9) / (servers * (1 - utilisation))
    return chance * math.exp(-seconds / mean) if mean > 0 else 0.0


def wait(share: float, servers: int, utilisation: float, service: float, variation: float) -> float:
    """The seconds that `share` of the requests do not wait longer than."""
    chance = erlang_c(min(servers, _SERVERS), utilisation)
    if chance <= 1 - share:
        return 0.0
    return service * max(variation, 1e-9) / (servers * (1 - utilisation)) * math.log(chance / (1 - share))


def usable(seconds: float, share: float, servers: int, service: float, variation: float) -> float:
    """How busy `servers` may be so that `share` of the requests wait no longer than `seconds`; at most `MOST`."""
    servers = min(servers, _SERVERS)
    low, high = 0.0, MOST
    if waits_longer(seconds, servers, high, service, variation) <= 1 - share:
        return high
    for _ in range(30):
        middle = (low + high) / 2
        if waits_longer(seconds, servers, middle, service, variation) <= 1 - share:
            low = middle
        else:
            high = middle
    return low


def steps(shares: Callable[[int], tuple[float, ...]], most: int) -> list[tuple[int, tuple[float, ...]]]:
    """From which number of engines on which shares hold, in few steps: a new one where a share has risen enough."""
    found = [(1, shares(1))]
    for count in _COUNTS[1:]:
        if count > most:
            break
        mine = shares(count)
        if any(new - old >= _STEP for new, old in zip(mine, found[-1][1], strict=True)):
            found.append((count, mine))
    return found


def variation(values: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """Mean and squared coefficient of variation of weighted values."""
    total = sum(weights)
    mean = sum(value * weight for value, weight in zip(values, weights, strict=True)) / total
    square = sum(value**2 * weight for value, weight in zip(values, weights, strict=True)) / total
    return mean, max(square / mean**2 - 1, 0.0) if mean > 0 else 0.0
