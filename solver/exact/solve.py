"""The best placement of a problem, with proof; or what is missing for there to be one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from deeplink.errors import SolverError
from deeplink.solver.exact import highs, program, warm
from deeplink.solver.exact.highs import Answer, Effort
from deeplink.solver.exact.problem import Objective, Problem
from deeplink.solver.exact.program import Model
from deeplink.solver.exact.relax import Relaxation, relaxations

Status = Literal["optimal", "feasible", "infeasible"]

PROOF = 1e-4
"""Relative gap up to which an answer counts as optimal."""
_NOTHING = 1e-9
_TIE = 1e-6
_SLACKS = (1e-6, 1e-5, 1e-4)
_TIE_NODES = 30
"""Of the search for a nicer placement among equally good ones. Counted, not timed: the same on every machine."""


@dataclass(frozen=True, slots=True)
class Passed:
    """`rate` requests a second of a bucket from engines of candidate `prefill` to engines of candidate `decode`; the
    same candidate for both where one engine does it all."""

    prefill: int
    decode: int
    bucket: int
    rate: float


@dataclass(frozen=True, slots=True)
class Binding:
    """A limit that holds the objective back: `price` is by how much it would change with one more unit of the limit,
    with fractions of engines allowed."""

    kind: str
    name: str
    price: float


@dataclass(frozen=True, slots=True)
class Solution:
    """`value` is what the objective says: cost per hour, a multiple of the workload's rate, watts or seconds. `counts`
    are engines by candidate, those that run at all. `passed[s]` is what goes where in each scenario."""

    status: Status
    objective: Objective
    value: float = 0.0
    bound: float = 0.0
    counts: Mapping[int, int] | None = None
    passed: tuple[tuple[Passed, ...], ...] = ()
    bindings: tuple[Binding, ...] = ()
    relaxations: tuple[Relaxation, ...] = ()

    @property
    def gap(self) -> float:
        return abs(self.value - self.bound) / max(abs(self.value), 1e-9)


def solve(problem: Problem, objective: Objective, effort: Effort | None = None, *, nicest: bool = True) -> Solution:
    """Raises SolverError when not even a placement was found in time, which says nothing about whether there is one.

    Of several placements as good, the `nicest` has the fewest pools, then the fewest engines to move, then the fewest
    engines; without it any one is taken, in about half the time, and where there is none it is not sought what would
    be enough.
    """
    effort = effort or Effort()
    if objective == "latency":
        return _fastest(problem, effort, nicest)
    model = program.build(problem, scale=_SCALES.get(objective, ""))
    answer = _first(model, objective, effort)
    # To serve none of the rate is always possible, and no placement.
    nothing = model.theta is not None and bool(answer.values) and answer.bound <= _NOTHING
    if answer.status == "infeasible" or nothing:
        return Solution("infeasible", objective, relaxations=relaxations(problem, effort) if nicest else ())
    if not answer.values or not math.isfinite(answer.bound):
        raise SolverError(
            f"nothing was proven in {effort.seconds:g} s: neither a placement nor that there is none",
            field="solve.seconds",
            remedy="give it more time, or fewer sizes of groups, buckets or scenarios",
        )
    counts = _counts(model, _nicest(model, objective, answer, effort) if nicest else answer.values)
    status: Status = "optimal" if answer.status == "optimal" and answer.gap <= PROOF else "feasible"
    passed = _balanced(problem, objective, counts, answer.value)
    return Solution(status, objective, answer.value, answer.bound, counts, passed, _bindings(model, objective))


def shared_out(problem: Problem, counts: Mapping[int, int]) -> tuple[Passed, ...]:
    """What goes where through these engines in the normal scenario, so that the busiest are as little busy as can be.
    Raises SolverError when they do not cope."""
    normal = replace(problem, scenarios=problem.scenarios[:1])
    return _balanced(normal, "cost", counts, 1.0)[0]


_SCALES: dict[str, str] = {"throughput": "normal", "capacity": "all"}


def _terms(model: Model, objective: Objective) -> tuple[dict[int, float], bool]:
    if model.theta is not None:
        return {model.theta: 1.0}, True
    return (model.energy if objective == "energy" else model.cost), False


def _first(model: Model, objective: Objective, effort: Effort) -> Answer:
    terms, maximise = _terms(model, objective)
    begin = warm.start(model, terms, maximise=maximise)
    return highs.solve(model.program, terms, maximise=maximise, effort=effort, start=begin)


def _nicest(model: Model, objective: Objective, answer: Answer, effort: Effort) -> tuple[float, ...]:
    """Among placements as good as the answer, one with few pools, then with few engines to move, then with few."""
    terms, maximise = _terms(model, objective)
    slack = _TIE * max(abs(answer.value), 1.0)
    bounds = (answer.value - slack, highs.INFINITY) if maximise else (-highs.INFINITY, answer.value + slack)
    model.program.row(terms, *bounds)
    problem, rest = model.problem, model.program
    total = sum(pool.count for pool in problem.pools) + 1.0
    nice = model.count(dict.fromkeys(range(len(problem.candidates)), 1.0))
    start = list(answer.values)
    counts = _counts(model, answer.values)
    for p, pool in enumerate(problem.pools):
        used = rest.column(0, 1, integer=True)
        mine = model.count({k: float(c.chips) for k, c in enumerate(problem.candidates) if c.pool == p})
        rest.row({**mine, used: -float(pool.count)}, -highs.INFINITY, 0.0)
        nice[used] = total * total
        start.append(1.0 if any(problem.candidates[k].pool == p for k in counts) else 0.0)
    kinds = {(c.pool, c.role, c.chips): c.current for c in problem.candidates if c.current}
    for (pool_index, role, chips), current in kinds.items():
        alike = [k for k, c in enumerate(problem.candidates) if (c.pool, c.role, c.chips) == (pool_index, role, chips)]
        moved = rest.column(0, current)
        rest.row({**model.count(dict.fromkeys(alike, 1.0)), moved: 1.0}, current, highs.INFINITY)
        nice[moved] = total
        start.append(max(0.0, current - sum(counts.get(k, 0) for k in alike)))
    found = highs.solve(rest, nice, effort=Effort(1e-9, effort.seconds, _TIE_NODES), start=start)
    return found.values or answer.values


def _counts(model: Model, values: tuple[float, ...] | list[float]) -> dict[int, int]:
    counts = {k: sum(round(values[column]) for column in columns) for k, columns in enumerate(model.engines)}
    return {k: count for k, count in counts.items() if count > 0}


def _balanced(
    problem: Problem, objective: Objective, counts: Mapping[int, int], value: float
) -> tuple[tuple[Passed, ...], ...]:
    """What goes where, so that in each scenario the busiest engines are as little busy as can be."""
    found = []
    factor = {"throughput": (value, 1.0), "capacity": (value, value)}.get(objective, (1.0, 1.0))
    for index, scenario in enumerate(problem.scenarios):
        for slack in _SLACKS:  # what was an engine to within a tolerance is now a whole one
            times = factor[min(index, 1)] * (1 - slack)
            one = replace(problem, scenarios=(replace(scenario, rate=scenario.rate * times),))
            model = program.build(one, counts=counts)
            assert model.peak is not None
            answer = highs.solve(model.program, {model.peak: 1.0})
            if answer.values:
                break
        else:
            raise SolverError(
                f"the engines that were found do not cope with {scenario.name!r} after all",
                remedy="report it with the fleet file; it is a fault of the arithmetic's tolerances",
            )
        found.append(tuple(_passed(model, 0, answer.values)))
    return tuple(found)


def _passed(model: Model, scenario: int, values: tuple[float, ...]) -> list[Passed]:
    """Who hands how much to whom. The program keeps flows between classes and pools; here they are shared out among
    the engines in proportion."""
    problem = model.problem
    flows = model.flows[scenario]
    decoded: dict[tuple[int, int], dict[int, float]] = {}
    passed = []
    for k, candidate in enumerate(problem.candidates):
        for b, column in flows[k].items():
            if values[column] <= 1e-9:
                continue
            if candidate.role == "both":
                passed.append(Passed(k, k, b, values[column]))
            elif candidate.role == "decode":
                decoded.setdefault((candidate.pool, b), {})[k] = values[column]
    for one in model.classes[scenario]:
        leaving = {r: values[column] for r, column in one.routes.items() if values[column] > 1e-9}
        total = sum(leaving.values())
        for k, column in one.engines.items():
            for r, rate in leaving.items():
                takers = decoded.get((problem.routes[r].target, one.bucket), {})
                arriving = sum(takers.values())
                for taker, taken in takers.items():
                    amount = values[column] * rate / total * taken / arriving
                    if amount > 1e-9:
                        passed.append(Passed(k, taker, one.bucket, amount))
    return passed


def _bindings(model: Model, objective: Objective) -> tuple[Binding, ...]:
    terms, maximise = _terms(model, objective)
    rows = len(model.rows) and max(model.rows) + 1
    found: dict[tuple[str, str], float] = {}
    for row, price in highs.duals(model.program, terms, maximise=maximise).items():
        if (
            row < rows
            and row in model.rows
            and model.rows[row][0] in ("inventory", "hosts", "link", "demand", "budget")
        ):
            found[model.rows[row]] = found.get(model.rows[row], 0.0) + price
    ordered = sorted(found.items(), key=lambda item: (item[0][0], item[0][1]))
    return tuple(Binding(kind, name, float(f"{price:.6g}")) for (kind, name), price in ordered)


def _fastest(problem: Problem, effort: Effort, nicest: bool) -> Solution:
    """The shortest time to first token within which everything can be served, among the times there are; then the
    cheapest placement that does it."""
    times = sorted(_times(problem))

    def possible(index: int) -> bool:
        model = program.build(replace(problem, ttft=times[index]))
        answer = highs.solve(model.program, {}, effort=effort)
        if answer.status == "unknown":
            raise SolverError(f"no placement was found in {effort.seconds:g} s, nor that there is none")
        return answer.status != "infeasible"

    if not times or not possible(len(times) - 1):
        return Solution("infeasible", "latency", relaxations=relaxations(problem, effort) if nicest else ())
    low, high = 0, len(times) - 1
    while low < high:
        middle = (low + high) // 2
        if possible(middle):
            high = middle
        else:
            low = middle + 1
    best = solve(replace(problem, ttft=times[high]), "cost", effort, nicest=nicest)
    return replace(best, status="optimal", objective="latency", value=times[high], bound=times[high])


def _times(problem: Problem) -> set[float]:
    """Every time to first token that an engine and a route can have, within the limit."""
    found = set()
    for candidate in problem.candidates:
        for b in range(len(problem.rates)):
            if problem.rates[b] <= 0 or not candidate.serves[b]:
                continue
            if candidate.role == "both" and problem.in_time(candidate, b):
                found.add(candidate.latency[b])
            elif candidate.role == "prefill":
                found |= {
                    candidate.latency[b] + route.adds(candidate, b)
                    for route in problem.routes
                    if route.source == candidate.pool and problem.in_time(candidate, b, route)
                }
    return found
