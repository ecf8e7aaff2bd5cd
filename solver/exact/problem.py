"""What is to be decided, as numbers: pools of chips, candidate engines, requests, routes, links and scenarios.

Nothing here knows chips, models or files. A problem is what the exact core (`deeplink.solver.exact.program`) answers,
and what a second, independent answer can be compared with.

A *candidate* is one way to run an engine: on which pool, in which role, on how many chips. A solution says how many
engines of each candidate run, and how many requests a second of each *bucket* (requests of similar lengths) go where.
What an engine can do is stated in *uses*: for each of its resources, such as its time or its memory, how much of one
engine a request a second of each bucket takes up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["prefill", "decode", "both"]
Objective = Literal["cost", "throughput", "capacity", "energy", "latency"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Chips of one type in one place. `price` is per chip and hour, `watts` per chip.

    `aligned` says how many of the chips can be used by groups that must not be spread over hosts: (group size, chips
    in whole groups of that size), for the sizes for which it is less than `count`. It is exact where each size divides
    the next.
    """

    name: str
    count: int
    price: float = 0.0
    watts: float = 0.0
    aligned: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Cap:
    """From `count` engines on, the share of each resource of each engine that may be in use. More engines behind one
    queue wait less for each other, so shares rise with the count."""

    count: int
    shares: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to run an engine, on `groups` groups of `group` chips each.

    `uses[r][b]` is the part of one engine's resource r that one request a second of bucket b takes. `latency[b]` is
    the time to the end of prefill, waiting included, in seconds; zeros for decode. `serves[b]` says whether it may
    serve the bucket at all. `current` is how many engines of its pool, role and size run now.
    """

    name: str
    role: Role
    pool: int
    group: int
    uses: tuple[tuple[float, ...], ...]
    latency: tuple[float, ...]
    serves: tuple[bool, ...]
    caps: tuple[Cap, ...]
    groups: int = 1
    current: int = 0

    @property
    def chips(self) -> int:
        return self.group * self.groups

    def shares(self, count: int) -> tuple[float, ...]:
        """The usable shares of each of `count` engines."""
        return max((cap for cap in self.caps if cap.count <= count), key=lambda cap: cap.count).shares


@dataclass(frozen=True, slots=True)
class Link:
    """What some routes share: `capacity` in all, or for each chip of `pool` that runs in `role`. In whatever unit the
    routes' loads are."""

    name: str
    capacity: float
    pool: int | None = None
    role: Role = "prefill"


@dataclass(frozen=True, slots=True)
class Route:
    """Prefill in pool `source` may hand over to decode in pool `target`.

    Handing a request of bucket b over takes `latency` plus `seconds[b]`, the latter divided among the chips of the
    prefill engine, but at most among `parallel`. `loads` are what a request a second puts on links: pairs of a link and
    the load for each bucket.
    """

    source: int
    target: int
    seconds: tuple[float, ...]
    loads: tuple[tuple[int, tuple[float, ...]], ...] = ()
    latency: float = 0.0
    parallel: int = 1

    def adds(self, candidate: Candidate, bucket: int) -> float:
        """Seconds between this engine's end of prefill and the cache being where it is decoded."""
        return self.latency + self.seconds[bucket] / min(candidate.chips, self.parallel)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A situation the placement must cope with: the workload times `rate`, with `available[p]` of each pool left."""

    name: str
    rate: float
    available: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """`rates[b]` are requests a second, `ttft` seconds from a request's arrival to its first token. The first scenario
    is the normal one. `budget` bounds the cost per hour."""

    pools: tuple[Pool, ...]
    candidates: tuple[Candidate, ...]
    rates: tuple[float, ...]
    scenarios: tuple[Scenario, ...]
    routes: tuple[Route, ...] = ()
    links: tuple[Link, ...] = ()
    ttft: float = float("inf")
    budget: float = float("inf")
    buckets: tuple[str, ...] = ()

    def price(self, candidate: Candidate) -> float:
        return self.pools[candidate.pool].price * candidate.chips

    def watts(self, candidate: Candidate) -> float:
        return self.pools[candidate.pool].watts * candidate.chips

    def in_time(self, candidate: Candidate, bucket: int, route: Route | None = None) -> bool:
        """Whether a prefill (or aggregated, without a route) engine gives the first token of this bucket in time."""
        added = route.adds(candidate, bucket) if route is not None else 0.0
        return candidate.serves[bucket] and candidate.latency[bucket] + added <= self.ttft * (1 + 1e-12)


def useful(problem: Problem) -> tuple[Candidate, ...]:
    """The candidates without those that another one of the same pool and role replaces: on no more chips, in no larger
    groups, no slower for any bucket, with no more use of any resource.

    The optimum is the same with and without them. Of two equal ones the first stays.
    """
    kept: list[Candidate] = []
    for mine in problem.candidates:
        if any(_replaces(other, mine) for other in kept):
            continue
        kept = [other for other in kept if not _replaces(mine, other)]
        kept.append(mine)
    order = {id(candidate): index for index, candidate in enumerate(problem.candidates)}
    return tuple(sorted(kept, key=lambda candidate: order[id(candidate)]))


def _replaces(a: Candidate, b: Candidate) -> bool:
    if (a.pool, a.role) != (b.pool, b.role) or len(a.uses) != len(b.uses):
        return False
    if a.chips != b.chips or a.group > b.group:
        return False  # fewer chips an engine means more engines, which is another trade
    if any(theirs and not ours for ours, theirs in zip(a.serves, b.serves, strict=True)):
        return False
    if any(ours > theirs for ours, theirs in zip(a.latency, b.latency, strict=True)):
        return False
    if any(
        ours > theirs for mine, its in zip(a.uses, b.uses, strict=True) for ours, theirs in zip(mine, its, strict=True)
    ):
        return False
    counts = sorted({cap.count for cap in (*a.caps, *b.caps)})
    return all(
        ours >= theirs for count in counts for ours, theirs in zip(a.shares(count), b.shares(count), strict=True)
    )
