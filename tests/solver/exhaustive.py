"""The best placement by trying all of them: every number of engines of each candidate, with a linear program of its
own.

Written against the meaning of a problem, not against `deeplink.solver.exact.program`: flows are kept between each two
engines that may hand over, the caps are looked up for the number at hand, and what fits onto hosts is found by packing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import highspy

from deeplink.solver.exact.problem import Candidate, Problem, Scenario

TOLERANCE = 1e-7


def placements(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Every number of engines of each candidate that the inventory and the budget allow."""
    most = [problem.pools[c.pool].count // c.chips for c in problem.candidates]
    for counts in itertools.product(*(range(n + 1) for n in most)):
        if all(_packs(problem, counts, p) for p in range(len(problem.pools))) and (
            cost(problem, counts) <= problem.budget + 1e-9
        ):
            yield counts


def _packs(problem: Problem, counts: tuple[int, ...], p: int) -> bool:
    """Onto hosts, largest groups first, which is right where sizes divide each other. `aligned` only says how much is
    left for a size, so the hosts are not known here; what it says is checked as it stands."""
    pool = problem.pools[p]
    mine = [(c, n) for c, n in zip(problem.candidates, counts, strict=True) if c.pool == p]
    if sum(c.chips * n for c, n in mine) > pool.count:
        return False
    return all(sum(c.chips * n for c, n in mine if c.group >= size) <= usable for size, usable in pool.aligned)


def cost(problem: Problem, counts: tuple[int, ...]) -> float:
    return sum(n * c.chips * problem.pools[c.pool].price for c, n in zip(problem.candidates, counts, strict=True))


def watts(problem: Problem, counts: tuple[int, ...]) -> float:
    return sum(n * c.chips * problem.pools[c.pool].watts for c, n in zip(problem.candidates, counts, strict=True))


def cheapest(problem: Problem, price=cost) -> float | None:
    for counts in sorted(placements(problem), key=lambda counts: price(problem, counts)):
        if all(multiple(problem, counts, scenario, 1.0) >= 1.0 - TOLERANCE for scenario in problem.scenarios):
            return price(problem, counts)
    return None


def most(problem: Problem, *, everywhere: bool) -> float | None:
    """The largest multiple of the workload's rate, in the normal scenario or in every one. None where it is nothing."""
    best = None
    for counts in placements(problem):
        normal, *others = problem.scenarios
        if everywhere:
            found = min(multiple(problem, counts, scenario) for scenario in problem.scenarios)
        else:
            if any(multiple(problem, counts, scenario, 1.0) < 1 - TOLERANCE for scenario in others):
                continue
            found = multiple(problem, counts, normal)
        best = found if best is None else max(best, found)
    return best if best is not None and best > 1e-9 else None


def quickest(problem: Problem) -> float | None:
    """The shortest time to first token, by trying each there is."""
    from dataclasses import replace

    times = sorted(
        {
            candidate.latency[b] + (route.adds(candidate, b) if route else 0.0)
            for candidate in problem.candidates
            for b in range(len(problem.rates))
            if candidate.serves[b] and candidate.role != "decode"
            for route in (
                [None] if candidate.role == "both" else [r for r in problem.routes if r.source == candidate.pool]
            )
        }
    )
    for time in times:
        if time <= problem.ttft and cheapest(replace(problem, ttft=time)) is not None:
            return time
    return None


def multiple(problem: Problem, counts: tuple[int, ...], scenario: Scenario, enough: float = 1e6) -> float:
    """How many times the scenario's rate these engines serve; -1 if nothing at all is possible."""
    solver = highspy.Highs()
    solver.silent()
    theta = solver.addVariable(0, enough)
    running = [(k, c, n) for k, (c, n) in enumerate(zip(problem.candidates, counts, strict=True)) if n]
    used: dict[int, list[list]] = {k: [[] for _ in c.uses] for k, c, _ in running}
    on_link: list[list] = [[] for _ in problem.links]
    served: list[list] = [[] for _ in problem.rates]

    def takes(k: int, c: Candidate, b: int, flow) -> None:
        for r, use in enumerate(c.uses):
            used[k][r].append(use[b] * flow)

    for b, rate in enumerate(problem.rates):
        if rate <= 0:
            continue
        for k, c, _ in running:
            if not c.serves[b]:
                continue
            if c.role == "both" and c.latency[b] <= problem.ttft:
                flow = solver.addVariable(0)
                takes(k, c, b, flow)
                served[b].append(flow)
            if c.role != "prefill":
                continue
            for j, d, _ in running:
                if d.role != "decode" or not d.serves[b]:
                    continue
                for route in problem.routes:
                    if (route.source, route.target) != (c.pool, d.pool):
                        continue
                    seconds = route.latency + route.seconds[b] / min(c.chips, route.parallel)
                    if c.latency[b] + seconds > problem.ttft:
                        continue
                    flow = solver.addVariable(0)
                    takes(k, c, b, flow)
                    takes(j, d, b, flow)
                    served[b].append(flow)
                    for link, load in route.loads:
                        on_link[link].append(load[b] * flow)
    for b, rate in enumerate(problem.rates):
        if rate > 0:
            if not served[b]:
                return 0.0
            solver.addConstr(sum(served[b]) == rate * scenario.rate * theta)
    for k, c, n in running:
        shares = next(cap.shares for cap in reversed(c.caps) if cap.count <= n)
        for r, terms in enumerate(used[k]):
            if terms:
                solver.addConstr(sum(terms) <= shares[r] * n * scenario.available[c.pool])
    for index, link in enumerate(problem.links):
        if not on_link[index]:
            continue
        capacity = link.capacity
        if link.pool is not None:
            chips = sum(c.chips * n for _, c, n in running if (c.pool, c.role) == (link.pool, link.role))
            capacity *= chips * scenario.available[link.pool]
        solver.addConstr(sum(on_link[index]) <= capacity)
    solver.maximize(theta)
    return float(solver.getInfo().objective_function_value)
