"""A problem as a mixed-integer program: how many engines of each candidate, and how many requests go where.

For every scenario, with flows of its own and the engines shared by all:

    demand     what is prefilled for others plus what is served whole = the scenario's rate, for each bucket
    balance    what a pool's prefill engines produce is what leaves on its routes, and what arrives is decoded
    capacity   each resource of a candidate's engines, times the share that may be in use
    links      bytes a second on what routes share

and for all together the inventory. Whether the first token is in time depends on the prefill engine and on the route,
not on which of the target's engines decodes. So the prefill engines of a pool are put in classes by the routes on which
they are in time, and flows are kept between a class and a pool; there are few of them, where there would be thousands
between engines.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from deeplink.solver.exact.highs import Program
from deeplink.solver.exact.problem import Candidate, Problem, Scenario

Terms = dict[int, float]


@dataclass(frozen=True, slots=True)
class Class:
    """Prefill engines of one pool that are in time for a bucket on the same routes: the columns of their requests by
    candidate, and of what leaves by route."""

    bucket: int
    engines: dict[int, int]
    routes: dict[int, int]


@dataclass(slots=True)
class Model:
    """The program with the meaning of its columns.

    `engines[k]` are the columns of candidate k, one for each step of its caps; `flows[s][k][b]` the column of its
    requests; `classes[s]` what is handed over; `theta` the multiple of the workload's rate. `rows` are the rows that
    mean something to people: kind and name. `peak` is how much of what may be in use is, at most.
    """

    problem: Problem
    program: Program
    engines: list[list[int]] = field(default_factory=list)
    flows: list[list[dict[int, int]]] = field(default_factory=list)
    classes: list[list[Class]] = field(default_factory=list)
    theta: int | None = None
    peak: int | None = None
    rows: dict[int, tuple[str, str]] = field(default_factory=dict)

    def count(self, weights: Mapping[int, float]) -> Terms:
        """`weights[k]` times the number of engines of each candidate k, as terms."""
        return {column: weight for k, weight in weights.items() for column in self.engines[k]}

    @property
    def cost(self) -> Terms:
        return self.count({k: self.problem.price(c) for k, c in enumerate(self.problem.candidates)})

    @property
    def energy(self) -> Terms:
        return self.count({k: self.problem.watts(c) for k, c in enumerate(self.problem.candidates)})


def build(
    problem: Problem,
    *,
    scale: str = "",
    growing: Collection[int] | None = None,
    counts: Mapping[int, int] | None = None,
) -> Model:
    """`scale` says which scenarios' rates are multiplied by `theta`, the rate to be found: "normal" for the first one,
    "all" for every one, nothing for none. Only the rates of the `growing` buckets, if they are given.

    With `counts` just these engines run, all is linear, and how much of them is in use is the column `peak`.
    """
    model = Model(problem, Program())
    if scale:
        model.theta = model.program.column()
    if counts is not None:
        model.peak = model.program.column(0.0, 1.0)
    for k, candidate in enumerate(problem.candidates):
        model.engines.append(
            _engines(model, candidate) if counts is None else _fixed(model, candidate, counts.get(k, 0))
        )
    if counts is None:
        _inventory(model)
    for index, scenario in enumerate(problem.scenarios):
        theta = model.theta if scale == "all" or (scale == "normal" and index == 0) else None
        _scenario(model, scenario, theta, growing)
    if problem.budget < float("inf") and counts is None:
        _row(model, model.cost, -float("inf"), problem.budget, "budget", "")
    return model


def _fixed(model: Model, candidate: Candidate, count: int) -> list[int]:
    last = max((index for index, cap in enumerate(candidate.caps) if cap.count <= count), default=0)
    return [
        model.program.column(count if index == last else 0, count if index == last else 0)
        for index in range(len(candidate.caps))
    ]


def _row(model: Model, terms: Terms, lower: float, upper: float, kind: str, name: str) -> None:
    model.rows[model.program.row(terms, lower, upper)] = (kind, name)


def _most(problem: Problem, candidate: Candidate) -> int:
    pool = problem.pools[candidate.pool]
    usable = min([pool.count, *(chips for size, chips in pool.aligned if size <= candidate.group)])
    return usable // candidate.chips


def _engines(model: Model, candidate: Candidate) -> list[int]:
    """Columns for the number of engines. With several caps, at most one of the columns is not 0: the one of the cap
    that holds for that number."""
    program, most = model.program, _most(model.problem, candidate)
    if len(candidate.caps) == 1:
        return [program.column(0, most, integer=True)]
    columns, chosen = [], {}
    for cap, after in zip(candidate.caps, [*candidate.caps[1:], None], strict=True):
        last = most if after is None else min(after.count - 1, most)
        if last < cap.count:
            columns.append(program.column(0, 0, integer=True))
            continue
        column = program.column(0, last, integer=True)
        if cap.count == last == 1:
            chosen[column] = 1.0
        else:
            switch = program.column(0, 1, integer=True)
            chosen[switch] = 1.0
            program.row({column: 1.0, switch: -float(last)}, -float("inf"), 0.0)
            program.row({column: 1.0, switch: -float(cap.count)}, 0.0, float("inf"))
        columns.append(column)
    if len(chosen) > 1:
        program.row(chosen, 0.0, 1.0)
    return columns


def _inventory(model: Model) -> None:
    problem = model.problem
    for p, pool in enumerate(problem.pools):
        mine = {k: c for k, c in enumerate(problem.candidates) if c.pool == p}
        chips = model.count({k: float(c.chips) for k, c in mine.items()})
        if chips:
            _row(model, chips, -float("inf"), pool.count, "inventory", pool.name)
        for size, usable in pool.aligned:
            large = model.count({k: float(c.chips) for k, c in mine.items() if c.group >= size})
            if large:
                _row(model, large, -float("inf"), usable, "hosts", f"{pool.name}, groups of {size}")


def _scenario(model: Model, scenario: Scenario, theta: int | None, growing: Collection[int] | None) -> None:
    problem, program = model.problem, model.program
    buckets = range(len(problem.rates))
    flows: list[dict[int, int]] = []
    demand: list[Terms] = [{} for _ in buckets]
    classes: dict[tuple[int, int, tuple[int, ...]], dict[int, int]] = defaultdict(dict)
    arriving: dict[tuple[int, int], Terms] = defaultdict(dict)
    reached = {route.target for route in problem.routes}
    for k, candidate in enumerate(problem.candidates):
        mine: dict[int, int] = {}
        for b in buckets:
            if problem.rates[b] <= 0 or not candidate.serves[b]:
                continue
            if candidate.role == "both":
                if problem.in_time(candidate, b):
                    mine[b] = program.column()
                    demand[b][mine[b]] = 1.0
            elif candidate.role == "prefill":
                open_routes = tuple(
                    r
                    for r, route in enumerate(problem.routes)
                    if route.source == candidate.pool and problem.in_time(candidate, b, route)
                )
                if open_routes:
                    mine[b] = program.column()
                    classes[candidate.pool, b, open_routes][k] = mine[b]
            elif candidate.pool in reached:
                mine[b] = program.column()
                arriving[candidate.pool, b][mine[b]] = -1.0
        flows.append(mine)
    model.flows.append(flows)
    handed: list[Class] = []
    for (_, b, open_routes), engines in classes.items():
        balance = dict.fromkeys(engines.values(), 1.0)
        routes = {}
        for r in open_routes:
            routes[r] = column = program.column()
            balance[column] = -1.0
            demand[b][column] = 1.0
            arriving[problem.routes[r].target, b][column] = 1.0
        program.row(balance, 0.0, 0.0)
        handed.append(Class(b, engines, routes))
    model.classes.append(handed)
    for terms in arriving.values():
        program.row(terms, 0.0, 0.0)
    for b in buckets:
        if problem.rates[b] <= 0:
            continue
        wanted = problem.rates[b] * scenario.rate
        name = f"{scenario.name}: {problem.buckets[b] if problem.buckets else b}"
        if theta is not None and (growing is None or b in growing):
            _row(model, {**demand[b], theta: -wanted}, 0.0, 0.0, "demand", name)
        else:
            _row(model, demand[b], wanted, wanted, "demand", name)
    _capacity(model, scenario, flows)
    _links(model, scenario, handed)


def _capacity(model: Model, scenario: Scenario, flows: list[dict[int, int]]) -> None:
    for k, candidate in enumerate(model.problem.candidates):
        if not flows[k]:
            continue
        available = scenario.available[candidate.pool]
        for r, use in enumerate(candidate.uses):
            terms = {column: use[b] for b, column in flows[k].items()}
            if model.peak is None:
                for column, cap in zip(model.engines[k], candidate.caps, strict=True):
                    terms[column] = -cap.shares[r] * available
            else:
                caps = zip(model.engines[k], candidate.caps, strict=True)
                usable = sum(model.program.upper[column] * cap.shares[r] for column, cap in caps)
                terms[model.peak] = -usable * available
            _row(model, terms, -float("inf"), 0.0, "capacity", f"{scenario.name}: {candidate.name}")


def _links(model: Model, scenario: Scenario, handed: list[Class]) -> None:
    problem = model.problem
    for index, link in enumerate(problem.links):
        terms: Terms = {}
        for one in handed:
            for r, column in one.routes.items():
                for which, load in problem.routes[r].loads:
                    if which == index:
                        terms[column] = load[one.bucket]
        if not terms:
            continue
        name = f"{scenario.name}: {link.name}"
        if link.pool is None:
            _row(model, terms, -float("inf"), link.capacity, "link", name)
        else:
            left = link.capacity * scenario.available[link.pool]
            chips = {
                k: -left * c.chips
                for k, c in enumerate(problem.candidates)
                if c.pool == link.pool and c.role == link.role
            }
            _row(model, {**terms, **model.count(chips)}, -float("inf"), 0.0, "link", name)
