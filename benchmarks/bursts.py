"""Bursts decide: sixteen chips, prefill only, grouped by one, two, four or eight, on recorded traces.

A group of twice as many chips is 1.84 times as fast; a prompt's time is proportional to its tokens; grouped by one, the
chips are half busy at the trace's mean rate. What is asked for is the grouping that serves the most of the trace's rate
with 99 of 100 requests in time. The solver plans with the trace's own queues (`deeplink.solver.exact.replayed`) and is
held to what the simulator finds, for its own plan and for every other one there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from deeplink.solver.exact import queueing
from deeplink.solver.exact.problem import Candidate, Cap, Pool, Problem, Scenario, useful
from deeplink.solver.exact.replayed import Replayed
from deeplink.solver.exact.solve import solve
from deeplink.solver.fleets import trace
from deeplink.solver.fleets.fleet import Request, Workload
from deeplink.solver.simulator.simulate import Group, Result, Way, simulate

CHIPS = 16
SIZES = (1, 2, 4, 8)
EFFICIENCY = 0.92
WAITS = (0.1, 0.25, 0.5, 0.75, 0.9)
SHARE = 0.99
Plan = tuple[int, int, int, int]
"""Groups of each of the sizes."""


def speed(size: int) -> float:
    return float(size * EFFICIENCY ** (size.bit_length() - 1))


@dataclass(frozen=True, slots=True)
class Case:
    """A trace with the time that a token takes on one chip, and the time within which a first token is wanted."""

    requests: list[Request]
    load: Workload
    token: float
    ttft: float


def case(path: Path) -> Case:
    requests = [Request(r.at, r.prompt, 1) for r in trace.read(path)]
    load = trace.workload(requests, buckets=4, hits=0.0, source=path.name)
    token = 0.5 * CHIPS / load.rate / (sum(r.prompt for r in requests) / len(requests))
    prompts = sorted(r.prompt for r in requests)
    # The longest prompts but one in a hundred can be in time in groups of two.
    return Case(requests, load, token, max(10.0, 1.3 * token * prompts[int(0.99 * len(prompts))] / speed(2)))


def planned(of: Case, sizes: tuple[int, ...] = SIZES) -> tuple[float, Plan]:
    """The most of the trace's rate that the solver thinks can be served, and by which groups."""
    replayed = Replayed([r.at for r in of.requests], [float(r.prompt) for r in of.requests], SHARE)
    mean = sum(r.prompt for r in of.requests) / len(of.requests) * of.token
    candidates = []
    for size in sizes:
        times = tuple(b.prompt * of.token / speed(size) for b in of.load.buckets)
        for part in WAITS:
            wait = part * of.ttft

            def shares(count: int, wait: float = wait, size: int = size) -> tuple[float, ...]:
                return (replayed.usable(wait, count, mean / speed(size)),)

            candidates.append(
                Candidate(
                    name=f"{size}-{part}",
                    role="both",
                    pool=0,
                    group=size,
                    uses=(times,),
                    latency=tuple(wait + time for time in times),
                    serves=(True,) * len(times),
                    caps=tuple(Cap(count, found) for count, found in queueing.steps(shares, CHIPS // size)),
                )
            )
    problem = Problem(
        pools=(Pool(name="chips", count=CHIPS),),
        candidates=tuple(candidates),
        rates=tuple(of.load.rate * b.share for b in of.load.buckets),
        scenarios=(Scenario("normal", 1.0, (1.0,)),),
        ttft=of.ttft,
    )
    problem = replace(problem, candidates=useful(problem))
    found = solve(problem, "throughput")
    groups = dict.fromkeys(SIZES, 0)
    for k, count in (found.counts or {}).items():
        groups[problem.candidates[k].group] += count
    return found.value, (groups[1], groups[2], groups[4], groups[8])


def run(of: Case, plan: Plan, multiple: float) -> Result:
    groups, ways = [], []
    for size, count in zip(SIZES, plan, strict=True):
        if count:
            pace = of.token / speed(size)
            ways.append(Way(len(groups), len(groups), count * speed(size)))
            groups.append(
                Group(name=str(size), role="both", count=count, prefill=lambda tokens, pace=pace: tokens * pace)
            )
    return simulate(trace.scaled(of.requests, multiple), groups, [ways], lambda request: 0)


def attained(of: Case, plan: Plan, multiple: float) -> float:
    first = run(of, plan, multiple).first
    return sum(1 for seconds in first if seconds <= of.ttft) / len(first)


def sustained(of: Case, plan: Plan, low: float = 0.05, high: float = 4.0) -> float:
    """The most of the rate at which enough are in time, to a part in a hundred; 0 if not even `low` is."""
    if attained(of, plan, low) < SHARE:
        return 0.0
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if attained(of, plan, middle) >= SHARE else (low, middle)
    return low


def plans() -> Iterator[Plan]:
    """Every way to use all of the chips."""
    for eights in range(CHIPS // 8 + 1):
        for fours in range((CHIPS - 8 * eights) // 4 + 1):
            for twos in range((CHIPS - 8 * eights - 4 * fours) // 2 + 1):
                yield (CHIPS - 8 * eights - 4 * fours - 2 * twos, twos, fours, eights)


def best(of: Case, at_least: float) -> float:
    """The most of the rate that any plan sustains; plans that do not even sustain `at_least` need no closer look."""
    found = at_least
    for plan in plans():
        if attained(of, plan, found) >= SHARE:
            found = max(found, sustained(of, plan, found))
    return found
