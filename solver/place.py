"""A fleet in, its placement out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import msgspec

from deeplink.solver import placement as doc
from deeplink.solver import predict, verify
from deeplink.solver.exact import pareto, relax
from deeplink.solver.exact.highs import Effort
from deeplink.solver.exact.problem import Problem
from deeplink.solver.exact.solve import Passed, Solution, solve
from deeplink.solver.fleets import spanning
from deeplink.solver.fleets.candidates import Formulation, formulate
from deeplink.solver.fleets.fleet import Fleet
from deeplink.solver.kinds import DEFAULT
from deeplink.solver.placement import Placement
from deeplink.solver.sensitivity import Sensitivity, sensitivities
from deeplink.solver.verify import Verified

_LONGER = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0, 1000.0)
UNITS = {
    "cost": "an hour",
    "throughput": "times the rate",
    "capacity": "times the rate",
    "energy": "W",
    "latency": "s to the first token",
}
_DIGITS = 6
_ENOUGH = 0.02
_ENOUGH_NODES = 50
"""Gap and nodes for the fallback, which is a way out and not a plan."""


def place(fleet: Fleet) -> Placement:
    """The fleet's best placement, or why there is none. Raises SolverError when the time is up with neither."""
    formulation = formulate(fleet)
    if fleet.verify:
        return document(*verify.verified(formulation, fleet.verify))
    return document(formulation, solve(formulation.problem, fleet.objective, fleet.effort))


def fronts(fleet: Fleet, points: int) -> tuple[doc.Point, ...]:
    """What more of the rate costs: the cheapest placements for evenly spaced rates, up to the most there can be."""
    formulation = formulate(fleet)
    problem = formulation.problem
    found = []
    for point in pareto.front(problem, points, Effort(max(_ENOUGH / 4, fleet.effort.gap), fleet.effort.seconds)):
        counts = point.solution.counts or {}
        engines = {problem.candidates[k].name: n for k, n in sorted(counts.items())}
        found.append(
            doc.Point(
                _round(point.rate * fleet.workload.rate),
                _round(point.solution.value),
                _round(point.solution.gap),
                engines,
            )
        )
    return tuple(found)


def document(formulation: Formulation, solution: Solution, simulated: Verified | None = None) -> Placement:
    """What was found, in the terms of the fleet."""
    fleet, problem = formulation.fleet, formulation.problem
    counts = solution.counts or {}
    empty = Placement(
        version=doc.version_of(()),
        name=fleet.name,
        model=fleet.model.name,
        status=solution.status,
        objective=solution.objective,
        value=_round(solution.value),
        unit=UNITS[solution.objective],
        bound=_round(solution.bound),
        gap=_round(solution.gap),
        rate=fleet.workload.rate,
        cost=_round(sum(problem.price(problem.candidates[k]) * n for k, n in counts.items())),
        watts=_round(sum(problem.watts(problem.candidates[k]) * n for k, n in counts.items())),
        buckets=tuple(
            doc.Bucket(
                b.name,
                _round(b.prompt),
                _round(b.output),
                _round(b.cached),
                _round(b.share * fleet.workload.rate),
                b.longest,
            )
            for b in fleet.workload.buckets
        ),
        scenarios=tuple(scenario.name for scenario in problem.scenarios),
        relaxations=tuple(doc.Relaxation(r.what, _round(r.factor), r.text) for r in solution.relaxations),
        refused=tuple(doc.Refused(*pair) for pair in formulation.handoffs.refused),
        skipped=formulation.skipped,
        checkpoint=fleet.checkpoint or fleet.model.name,
    )
    if solution.status == "infeasible":
        other = [one for one in empty.relaxations if one.what != "ttft"]
        later = [one for one in (_later(fleet, "ttft"), _later(fleet, "tpot")) if one is not None]
        ordered = sorted([*other, *later], key=lambda one: (one.factor, one.what))
        return msgspec.structs.replace(empty, relaxations=tuple(ordered))
    sensitive = sensitivities(formulation, solution) if fleet.sensitivity else ()
    engines = _engines(formulation, solution)
    return msgspec.structs.replace(
        empty,
        version=doc.version_of(engines),
        status="model_too_uncertain" if any(one.slower is None for one in sensitive) else solution.status,
        sensitivity=tuple(_sensitivity(one) for one in sensitive),
        engines=engines,
        routes=routes(formulation, solution.passed[0]),
        predicted=_predicted(formulation, solution),
        simulated=None if simulated is None else _simulated(simulated),
        bindings=tuple(doc.Binding(b.kind, b.name, b.price) for b in solution.bindings),
        valid_while=_valid(formulation, counts),
        fallback=_fallback(formulation),
        split=_split(formulation, solution),
    )


def _later(fleet: Fleet, what: Literal["ttft", "tpot"]) -> doc.Relaxation | None:
    """How much longer a first or a further token would have to be allowed to take. It decides about the candidates, so
    each time is a problem of its own."""
    effort = Effort(_ENOUGH, min(fleet.effort.seconds, 10.0))
    for factor in _LONGER:
        seconds = getattr(fleet.service, what) * factor
        allowed = replace(fleet.service, **{what: seconds})
        if relax.possible(formulate(replace(fleet, service=allowed)).problem, effort):
            which = "a first token" if what == "ttft" else "each further token"
            return doc.Relaxation(what, factor, f"{which} within {seconds:.3g} s")
    return None


def _round(value: float) -> float:
    """Digits beyond these are the arithmetic's, not the answer's."""
    return float(f"{value:.{_DIGITS}g}")


def _engines(formulation: Formulation, solution: Solution) -> tuple[doc.Engine, ...]:
    problem, fleet = formulation.problem, formulation.fleet
    found = predict.loads(problem, solution.counts or {}, solution.passed[0])
    names = [bucket.name for bucket in fleet.workload.buckets]
    engines = []
    for k, load in sorted(found.items()):
        candidate = problem.candidates[k]
        setup, pool = formulation.setups[candidate.name], fleet.pools[candidate.pool]
        steps = [f"prefill {name}" for name in names] if candidate.role != "decode" else []
        steps += [f"decode step of {setup.batch}"] if candidate.role != "prefill" else []
        rates = tuple(
            doc.Rate(step, _round(r.seconds), _round(r.error), r.kind, r.source)
            for step, r in zip(steps, setup.rates, strict=True)
        )
        engines.append(
            doc.Engine(
                name=candidate.name,
                pool=pool.name,
                chip=pool.chip.name,
                role=candidate.role,
                count=load.count,
                tp=setup.tp,
                max_num_seqs=setup.batch if candidate.role != "prefill" else 0,
                max_num_batched_tokens=setup.chunk,
                kv_dtype=pool.dtype,
                busy=_round(max(load.busy)),
                rates=rates,
                profile=pool.start.profile,
                flags=pool.start.flags,
                variables=dict(pool.start.variables),
                image=pool.start.image,
                casts=pool.casts,
                hosts=spanning.hosts(pool, setup.tp),
                engine=msgspec.UNSET if pool.engine == DEFAULT else pool.engine,
            )
        )
    return tuple(engines)


def routes(formulation: Formulation, passed: Sequence[Passed]) -> tuple[doc.Route, ...]:
    """What goes where, as shares of each bucket, by the engines' names."""
    problem = formulation.problem
    total = [0.0] * len(problem.rates)
    for one in passed:
        total[one.bucket] += one.rate
    between = {(route.source, route.target): route for route in problem.routes}
    found = []
    for one in sorted(passed, key=lambda one: (one.bucket, one.prefill, one.decode)):
        prefill, decode = problem.candidates[one.prefill], problem.candidates[one.decode]
        handoff = 0.0 if one.prefill == one.decode else between[prefill.pool, decode.pool].adds(prefill, one.bucket)
        found.append(
            doc.Route(
                prefill.name,
                decode.name,
                problem.buckets[one.bucket],
                _round(one.rate),
                _round(one.rate / total[one.bucket]),
                _round(handoff),
            )
        )
    return tuple(found)


def _predicted(formulation: Formulation, solution: Solution) -> doc.Predicted:
    first, further = predict.first_token(formulation, solution), predict.next_token(formulation, solution)
    return doc.Predicted(
        *(
            doc.Range(_round(r.value), _round(r.low), _round(r.high))
            for r in (first.p50, first.p99, further.p50, further.p99)
        )
    )


def _simulated(found: Verified) -> doc.Simulated:
    return doc.Simulated(
        _round(found.attained),
        _round(found.ttft_p50),
        _round(found.ttft_p99),
        _round(found.tpot_p50),
        _round(found.tpot_p99),
        found.requests,
        found.rounds,
        _round(found.multiple),
    )


def _sensitivity(one: Sensitivity) -> doc.Sensitivity:
    slower, faster = (None if value is None else _round(value) for value in (one.slower, one.faster))
    return doc.Sensitivity(one.pool, _round(one.error), one.changes, _round(one.sustains), slower, faster)


def _valid(formulation: Formulation, counts: Mapping[int, int]) -> doc.Valid:
    problem, fleet = formulation.problem, formulation.fleet
    alone = {
        name: _round(rate * predict.headroom(problem, counts, b, fleet.effort))
        for b, (name, rate) in enumerate(zip(problem.buckets, problem.rates, strict=True))
        if rate > 0
    }
    return doc.Valid(
        rate_at_most=_round(fleet.workload.rate * predict.headroom(problem, counts, None, fleet.effort)),
        bucket_at_most=alone,
        burstiness_at_most=fleet.workload.burstiness,
        links_at_least=_round(predict.slowest_links(problem, counts, fleet.effort)),
    )


def aggregated(problem: Problem) -> Problem:
    """The same without handoffs."""
    return replace(problem, candidates=tuple(c for c in problem.candidates if c.role == "both"), routes=(), links=())


def _fallback(formulation: Formulation) -> doc.Fallback | None:
    problem = replace(aggregated(formulation.problem), budget=float("inf"))
    if not problem.candidates:
        return None
    found = solve(problem, "capacity", Effort(_ENOUGH, formulation.fleet.effort.seconds, _ENOUGH_NODES), nicest=False)
    engines = {problem.candidates[k].name: n for k, n in sorted((found.counts or {}).items())}
    return doc.Fallback(_round(found.value * formulation.fleet.workload.rate), engines)


def _split(formulation: Formulation, solution: Solution) -> doc.Split | None:
    if all(one.prefill == one.decode for one in solution.passed[0]):
        return None
    problem = aggregated(formulation.problem)
    alone = solve(problem, solution.objective, formulation.fleet.effort, nicest=False) if problem.candidates else None
    value = None if alone is None or alone.status == "infeasible" else _round(alone.value)
    return doc.Split(_round(solution.value), value)
