"""What a running placement needs when its workload or its engines are no longer as planned: the cheapest step that is
enough.

    nothing      it still holds
    weights      the same engines, other shares of the requests: seconds
    roles        the same engines, some in roles that none of their size has now
    batch        the same engines, in any roles, with other limits for the sequences and tokens of a step
    engines      more or fewer engines of the sizes that run, on the pools that run
    placement    anything
    impossible   not even that

Each step contains the ones before, so the first that is enough is the least that has to change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from deeplink.errors import SolverError
from deeplink.solver.exact import highs, program
from deeplink.solver.exact.problem import Problem
from deeplink.solver.exact.program import Model
from deeplink.solver.exact.solve import shared_out
from deeplink.solver.fleets.candidates import Formulation, formulate
from deeplink.solver.fleets.fleet import Fleet
from deeplink.solver.place import routes
from deeplink.solver.placement import Placement, Range, Route
from deeplink.solver.running import Kind, kinds, of_kind, renamed, taken_over

_SOME = 1e-9
"""A share for buckets of which nothing is seen, so that they have a mean."""

_MOST = 1e9
"""Requests a second, or seconds."""

Change = Literal["roles", "batch", "engines", "placement"]
"""Those in which other engines run, the least first."""
Step = Literal["nothing", "weights", "roles", "batch", "engines", "placement", "impossible"]


@dataclass(frozen=True, slots=True)
class Observed:
    """What is seen now: requests a second of each bucket by name, and where known the times that one in a hundred
    requests exceeds, in seconds. `lost` are chips that are gone, by pool."""

    rates: Mapping[str, float]
    ttft_p99: float = 0.0
    tpot_p99: float = 0.0
    lost: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Replan:
    """`step` is enough, because of `why`. `engines` are to run then, by candidate; `moved` is how many of them do not
    run now. `routes` are who hands to whom then, with which share."""

    step: Step
    why: tuple[str, ...]
    engines: Mapping[str, int]
    moved: int
    routes: tuple[Route, ...] = ()


def replan(fleet: Fleet, placement: Placement, seen: Observed) -> Replan:
    """Raises SolverError when the placement is not one of this fleet, and for what cannot be seen."""
    _check(fleet, seen)
    _require_same_kinds(fleet, placement)
    running = {engine.name: engine.count for engine in placement.engines}
    why = _why(placement, seen)
    if not why:
        return Replan("nothing", (), running, 0, placement.routes)
    formulation = formulate(_now(fleet, seen), keep=frozenset(running))
    problem = formulation.problem
    names = {candidate.name: k for k, candidate in enumerate(problem.candidates)}
    now = {pool.name for pool in formulation.fleet.pools}
    gone = {engine.name for engine in placement.engines if engine.pool not in now}
    gone &= {engine.name for engine in placement.engines if (seen.lost or {}).get(engine.pool)}
    unknown = sorted(set(running) - set(names) - gone)
    if unknown:
        raise SolverError(
            "the placement is not of this fleet",
            field="engines",
            ours=", ".join(sorted(names)[:5]) + ", …",
            theirs=unknown[0],
            remedy="give the fleet file that it was solved from",
        )
    counts = {names[name]: count for name, count in running.items() if name not in gone}
    if not seen.lost and highs.solve(program.build(problem, counts=counts).program, {}).values:
        return Replan("weights", why, running, 0, routes(formulation, shared_out(problem, counts)))
    of = kinds(formulation)
    if not seen.lost and (shares := _as_others(formulation, of, counts)):
        return Replan("weights", why, running, 0, shares)
    steps: tuple[Change, ...] = ("roles", "batch", "engines", "placement")
    for step in steps:
        found = _least(formulation, of, counts, step)
        if found is not None:
            engines = {problem.candidates[k].name: count for k, count in sorted(found.items())}
            now_running = of_kind(of, counts)
            moved = sum(max(0, n - now_running.get(kind, 0)) for kind, n in of_kind(of, found).items())
            return Replan(step, why, engines, moved, routes(formulation, shared_out(problem, found)))
    return Replan("impossible", why, running, 0, placement.routes)


def _require_same_kinds(fleet: Fleet, placement: Placement) -> None:
    """An engine of another kind is another engine, whatever it is called."""
    kinds_of = {pool.name: pool.engine for pool in fleet.pools}
    for engine in placement.engines:
        if kinds_of.get(engine.pool, engine.kind) != engine.kind:
            raise SolverError(
                "the placement is not of this fleet",
                field=f"engine of the pool {engine.pool}",
                ours=kinds_of[engine.pool],
                theirs=engine.kind,
                remedy="give the fleet file that it was solved from, or solve again: every engine of the pool changes",
            )


def _check(fleet: Fleet, seen: Observed) -> None:
    numbers = [(f"rates.{name}", rate) for name, rate in seen.rates.items()]
    numbers += [("ttft_p99", seen.ttft_p99), ("tpot_p99", seen.tpot_p99)]
    for field, value in numbers:
        if not 0 <= value <= _MOST:
            raise SolverError(
                "what is observed cannot be",
                field=field,
                ours=f"{value:g}",
                theirs=f"0 to {_MOST:g}",
                remedy="give requests a second, and seconds",
            )
    chips = {pool.name: pool.count for pool in fleet.pools}
    for name, lost in (seen.lost or {}).items():
        if name not in chips:
            raise SolverError(
                "no pool has this name",
                field="lost",
                ours=name,
                theirs=", ".join(chips),
                remedy="name the fleet's pools",
            )
        if not 0 <= lost <= chips[name]:
            raise SolverError(
                f"{name} cannot have lost so many chips",
                field=f"lost.{name}",
                ours=str(lost),
                theirs=f"0 to {chips[name]}",
                remedy="count the chips that are gone",
            )


def _why(placement: Placement, seen: Observed) -> tuple[str, ...]:
    """What is outside the region in which the placement is valid."""
    valid, predicted = placement.valid_while, placement.predicted
    if valid is None or predicted is None:
        raise SolverError("the placement is empty", remedy="solve a fleet that has one")
    unknown = sorted(set(seen.rates) - {bucket.name for bucket in placement.buckets})
    if unknown:
        raise SolverError(
            "no bucket has this name",
            field="rates",
            ours=", ".join(bucket.name for bucket in placement.buckets),
            theirs=unknown[0],
            remedy="name the placement's buckets",
        )
    why = []
    planned = {bucket.name: bucket.rate for bucket in placement.buckets}
    growth = max((rate / planned[name] for name, rate in seen.rates.items() if planned[name] > 0), default=0.0)
    # The rates are within the region if all together grew by no more than all together may.
    if growth * placement.rate > valid.rate_at_most * (1 + 1e-9):
        total = sum(seen.rates.values())
        why.append(
            f"{total:.4g} requests/s, one bucket at {growth:.3g} times its rate; valid up to {valid.rate_at_most:.4g}"
        )
    for name, value, range_ in (
        ("time to first token", seen.ttft_p99, predicted.ttft_p99),
        ("time of each further token", seen.tpot_p99, predicted.tpot_p99),
    ):
        if _beyond(value, range_):
            why.append(f"the {name} is {value:.4g} s, predicted {range_.low:.4g} to {range_.high:.4g}")
    why += [f"{count} chips of {pool} are gone" for pool, count in sorted((seen.lost or {}).items()) if count]
    return tuple(why)


def _beyond(value: float, predicted: Range) -> bool:
    return value > predicted.high


def _now(fleet: Fleet, seen: Observed) -> Fleet:
    total = sum(seen.rates.values())
    if total <= 0:
        raise SolverError("there is nothing to serve", field="rates", remedy="give each bucket's requests a second")
    buckets = tuple(replace(b, share=max(seen.rates.get(b.name, 0.0) / total, _SOME)) for b in fleet.workload.buckets)
    lost = seen.lost or {}
    pools = tuple(replace(pool, count=pool.count - lost.get(pool.name, 0)) for pool in fleet.pools)
    return replace(
        fleet,
        workload=replace(fleet.workload, rate=total, buckets=buckets),
        pools=tuple(pool for pool in pools if pool.count > 0),
        connections=tuple(
            c for c in fleet.connections if {c.source, c.target} <= {pool.name for pool in pools if pool.count > 0}
        ),
        situations=(),
    )


def _as_others(formulation: Formulation, of: list[Kind], counts: Mapping[int, int]) -> tuple[Route, ...]:
    """The shares with which the running engines are enough where some of them stand for others of their kind, with as
    few of these as can be; nothing where they are not."""
    problem = formulation.problem
    model = program.build(problem)
    running = of_kind(of, counts)
    for kind in dict.fromkeys(of):
        mine = model.count({k: 1.0 for k, one in enumerate(of) if one == kind})
        model.program.row(mine, float(running.get(kind, 0)), float(running.get(kind, 0)))
    objective = {}
    for k, columns in enumerate(model.engines):
        others = model.program.column()
        model.program.row({**dict.fromkeys(columns, 1.0), others: -1.0}, -highs.INFINITY, float(counts.get(k, 0)))
        objective[others] = 1.0
    answer = highs.solve(model.program, objective, effort=formulation.fleet.effort)
    if not answer.values:
        return ()
    wanted = _rounded(model, answer.values)
    taken = taken_over(of, counts, wanted)
    if taken is None:
        return ()
    name = [candidate.name for candidate in problem.candidates]
    names = {name[k]: {name[other]: number for other, number in mine.items()} for k, mine in taken.items()}
    return renamed(routes(formulation, shared_out(problem, wanted)), names)


def _rounded(model: Model, values: tuple[float, ...]) -> dict[int, int]:
    found = {k: sum(round(values[column]) for column in columns) for k, columns in enumerate(model.engines)}
    return {k: count for k, count in found.items() if count}


def _least(formulation: Formulation, of: list[Kind], counts: Mapping[int, int], step: Change) -> dict[int, int] | None:
    """The engines of which the fewest have to be started, then the cheapest, if the step is enough."""
    problem = formulation.problem
    model = program.build(problem)
    if step != "placement":
        _keep(model, problem, counts, exactly=step != "engines")
    if step == "roles":
        _keep_limits(model, of, counts)
    objective: dict[int, float] = {}
    running = of_kind(of, counts)
    for kind in dict.fromkeys(of):
        started = model.program.column()
        mine = model.count({k: 1.0 for k, one in enumerate(of) if one == kind})
        model.program.row({**mine, started: -1.0}, -highs.INFINITY, float(running.get(kind, 0)))
        objective[started] = 1.0
    price = sum(problem.pools[c.pool].price * problem.pools[c.pool].count for c in problem.candidates) + 1.0
    objective |= {column: value / price for column, value in model.cost.items()}
    answer = highs.solve(model.program, objective, effort=formulation.fleet.effort)
    return _rounded(model, answer.values) if answer.values else None


def _keep(model: Model, problem: Problem, counts: Mapping[int, int], *, exactly: bool) -> None:
    """Only groups of sizes that run, on pools that run; with `exactly` no more of them than run."""
    sizes: dict[tuple[int, int], int] = {}
    for k, count in counts.items():
        candidate = problem.candidates[k]
        sizes[candidate.pool, candidate.chips] = sizes.get((candidate.pool, candidate.chips), 0) + count
    for size in {(candidate.pool, candidate.chips) for candidate in problem.candidates}:
        mine = [k for k, c in enumerate(problem.candidates) if (c.pool, c.chips) == size]
        most = float(sizes[size]) if exactly and size in sizes else highs.INFINITY if size in sizes else 0.0
        if most < highs.INFINITY:
            model.program.row(model.count(dict.fromkeys(mine, 1.0)), 0.0, most)


def _keep_limits(model: Model, of: list[Kind], counts: Mapping[int, int]) -> None:
    """Where engines of a pool and size have a role now, they have it only with limits of a step that they have now."""
    now: dict[tuple[int, int, str], set[Kind]] = {}
    for k in counts:
        now.setdefault((of[k].pool, of[k].chips, of[k].role), set()).add(of[k])
    for k, kind in enumerate(of):
        if kind not in now.get((kind.pool, kind.chips, kind.role), {kind}):
            model.program.row(model.count({k: 1.0}), 0.0, 0.0)
