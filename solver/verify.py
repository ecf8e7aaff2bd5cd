"""A solved placement in the simulator: does it keep what it promises on a trace? And if not, plan less busy engines.

The queueing formulas know neither how arrivals drift nor how the batch of a decode engine comes and goes. So where a
trace is at hand the placement is simulated; if too few requests get their first token in time, or their further ones,
the engines that were too busy are planned less busy, and the problem is solved again. At most `ROUNDS` times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from deeplink.errors import SolverError
from deeplink.solver import predict
from deeplink.solver.exact.problem import Candidate
from deeplink.solver.exact.solve import Solution, solve
from deeplink.solver.fleets.candidates import Formulation
from deeplink.solver.fleets.configure import Setup
from deeplink.solver.fleets.fleet import Request
from deeplink.solver.fleets.trace import bucket_of, scaled
from deeplink.solver.simulator.simulate import Group, Policy, Result, Way, simulate

ROUNDS = 5
_LESS = 0.9
"""What is left of the share that may be in use, after each round."""


@dataclass(frozen=True, slots=True)
class Verified:
    """`attained` is the part of the requests within the service levels, in the simulator; `rounds` how often the
    problem was solved anew for it, and `multiple` of the workload's rate the requests came at."""

    attained: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    requests: int
    rounds: int
    multiple: float = 1.0


def model(formulation: Formulation, solution: Solution) -> tuple[list[Group], list[list[Way]], int]:
    """The engines, the ways of each bucket, and how many links there are."""
    problem = formulation.problem
    counts = dict(sorted((solution.counts or {}).items()))
    place = {k: index for index, k in enumerate(counts)}
    groups = [
        _group(problem.candidates[k], formulation.setups[problem.candidates[k].name], n, formulation)
        for k, n in counts.items()
    ]
    routes = {(route.source, route.target): route for route in problem.routes}
    ways: list[list[Way]] = [[] for _ in problem.rates]
    for one in solution.passed[0]:
        prefill, decode = problem.candidates[one.prefill], problem.candidates[one.decode]
        if one.prefill == one.decode:
            ways[one.bucket].append(Way(place[one.prefill], place[one.decode], one.rate))
            continue
        route = routes[prefill.pool, decode.pool]
        prompt = formulation.fleet.workload.buckets[one.bucket].prompt
        shared = next(
            ((link, load[one.bucket] / problem.links[link].capacity) for link, load in route.loads
             if problem.links[link].pool is None),
            (None, 0.0),
        )  # fmt: skip
        ways[one.bucket].append(
            Way(
                place[one.prefill],
                place[one.decode],
                one.rate,
                route.latency,
                (route.adds(prefill, one.bucket) - route.latency) / prompt,
                shared[0],
                shared[1] * formulation.fleet.link_share / prompt,
            )
        )
    return groups, ways, len(problem.links)


def _group(candidate: Candidate, setup: Setup, count: int, formulation: Formulation) -> Group:
    source = setup.source
    times: dict[int, float] = {}

    def prefill(tokens: int) -> float:
        rounded = max(16, round(tokens / 16) * 16)
        if rounded not in times:
            times[rounded] = source.prefill(rounded).seconds
        return times[rounded]

    return Group(
        name=candidate.name,
        role=candidate.role,
        count=count,
        prefill=prefill,
        step=_step(setup, formulation) if candidate.role != "prefill" else (0.0, 0.0, 0.0),
        batch=setup.batch,
        room=setup.room / setup.token_bytes,
        part=setup.part,
    )


def _step(setup: Setup, formulation: Formulation) -> tuple[float, float, float]:
    """A step's time as a plane over its sequences and cached tokens, fitted to the rates over the range in use."""
    buckets = formulation.fleet.workload.buckets
    contexts = sorted({b.prompt + b.output / 2 for b in buckets} | {b.prompt for b in buckets})
    batches = sorted({max(1, round(setup.batch * part)) for part in (0.01, 0.1, 0.25, 0.5, 0.75, 1.0)})
    points = [(n, context) for n in batches for context in contexts]
    seconds = np.array([setup.source.decode(n, context).seconds for n, context in points])
    matrix = np.array([[1.0, n, n * context] for n, context in points]) / seconds[:, None]
    found = np.linalg.lstsq(matrix, np.ones(len(points)), rcond=None)[0]
    fixed, each, cached = (max(float(value), 0.0) for value in found)
    return (fixed or min(seconds) / 2, each, cached)


def run(
    formulation: Formulation,
    solution: Solution,
    requests: Sequence[Request],
    *,
    policy: Policy = "least",
    seed: int = 0,
) -> Result:
    groups, ways, links = model(formulation, solution)
    missing = [b.name for b, mine in zip(formulation.fleet.workload.buckets, ways, strict=True) if not mine]
    if missing:
        raise SolverError(f"the placement serves no requests of {missing[0]}", remedy="solve for this workload")
    return simulate(
        requests, groups, ways, bucket_of(formulation.fleet.workload.buckets), links=links, policy=policy, seed=seed
    )


def judge(formulation: Formulation, result: Result, rounds: int = 0, multiple: float = 1.0) -> Verified:
    service = formulation.fleet.service
    return Verified(
        result.attained(service.ttft, service.tpot),
        result.percentile(0.5),
        result.percentile(0.99),
        result.percentile(0.5, further=True),
        result.percentile(0.99, further=True),
        len(result.first),
        rounds,
        multiple,
    )


def sustained(
    formulation: Formulation, solution: Solution, requests: Sequence[Request], about: float = 1.0
) -> Verified:
    """The most of the workload's rate at which the service levels are kept, to a part in a hundred, sought from half to
    double `about`."""
    wanted = formulation.fleet.service.percentile
    low, high = about / 2, about * 2
    best = judge(formulation, run(formulation, solution, scaled(requests, low)), 0, low)
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        found = judge(formulation, run(formulation, solution, scaled(requests, middle)), 0, middle)
        if found.attained >= wanted:
            low, best = middle, found
        else:
            high = middle
    return best


def verified(formulation: Formulation, requests: Sequence[Request]) -> tuple[Formulation, Solution, Verified | None]:
    """The best placement that also keeps the service levels in the simulator, or the last of `ROUNDS`.

    Where the rate is what is sought, the placement is simulated at the rate that was found, and if that is too much, at
    the most that it sustains.
    """
    fleet = formulation.fleet
    for rounds in range(ROUNDS + 1):
        solution = solve(formulation.problem, fleet.objective, fleet.effort)
        if solution.status == "infeasible":
            return formulation, solution, None
        if fleet.objective in ("throughput", "capacity"):
            return formulation, solution, sustained(formulation, solution, requests, solution.value)
        result = run(formulation, solution, requests)
        found = judge(formulation, result, rounds)
        if found.attained >= fleet.service.percentile or rounds == ROUNDS:
            return formulation, solution, found
        formulation = _tightened(formulation, solution, result)
    raise AssertionError("the loop ends in its last round")


def _tightened(formulation: Formulation, solution: Solution, result: Result) -> Formulation:
    """Every candidate of the pools and roles at fault may be less busy: prefill's where first tokens were late,
    decode's where further ones were."""
    problem, service = formulation.problem, formulation.fleet.service
    late = sum(1 for value in result.first if value > service.ttft)
    slow = sum(1 for value in result.further if value > service.tpot)
    roles = {"prefill", "both"} if late >= slow else {"decode", "both"}
    used = {(problem.candidates[k].pool, problem.candidates[k].role) for k in solution.counts or {}}
    candidates = tuple(
        replace(
            candidate,
            caps=tuple(replace(cap, shares=tuple(share * _LESS for share in cap.shares)) for cap in candidate.caps),
        )
        if (candidate.pool, candidate.role) in used and candidate.role in roles
        else candidate
        for candidate in problem.candidates
    )
    return replace(formulation, problem=replace(problem, candidates=candidates))


def busy(formulation: Formulation, solution: Solution) -> dict[str, float]:
    """How busy the formulas say each group is, by name, to compare with the simulator."""
    found = predict.loads(formulation.problem, solution.counts or {}, solution.passed[0])
    return {formulation.problem.candidates[k].name: load.busy[0] for k, load in found.items()}
