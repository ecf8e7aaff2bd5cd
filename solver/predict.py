"""What a solved placement should do: times of its requests, and how far its workload may move.

A request's time to first token is the wait at its prefill engines, whose distribution follows from how busy they are,
plus prefill, plus the handoff and one decode step where there is one. Over all requests that is a mixture, whose
percentiles are found by bisection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from deeplink.solver.estimates.rates import Rate
from deeplink.solver.exact import highs, program
from deeplink.solver.exact.highs import Effort
from deeplink.solver.exact.problem import Problem
from deeplink.solver.exact.queueing import variation, waits_longer
from deeplink.solver.exact.solve import Passed, Solution
from deeplink.solver.fleets.candidates import Formulation
from deeplink.solver.fleets.configure import Setup


@dataclass(frozen=True, slots=True)
class Load:
    """Of the engines of one candidate: requests a second by bucket, and how busy each resource of each of them is."""

    count: int
    rates: tuple[float, ...]
    busy: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Range:
    """A prediction, and between what it is in nine of ten cases."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Times:
    p50: Range
    p99: Range


def loads(problem: Problem, counts: Mapping[int, int], passed: Sequence[Passed]) -> dict[int, Load]:
    found = {}
    for k, count in counts.items():
        candidate = problem.candidates[k]
        rates = [0.0] * len(problem.rates)
        for one in passed:
            if k == (one.decode if candidate.role == "decode" else one.prefill):
                rates[one.bucket] += one.rate
        busy = tuple(sum(use * rate for use, rate in zip(uses, rates, strict=True)) / count for uses in candidate.uses)
        found[k] = Load(count, tuple(rates), busy)
    return found


@dataclass(frozen=True, slots=True)
class _Part:
    """Requests that have the same wait before them and the same time after it."""

    rate: float
    after: float
    busy: float
    servers: int
    service: float
    variation: float

    def longer(self, seconds: float) -> float:
        if seconds < self.after:
            return 1.0
        return waits_longer(seconds - self.after, self.servers, self.busy, self.service, self.variation)


def first_token(formulation: Formulation, solution: Solution) -> Times:
    """The time to first token of all requests together, in the normal scenario."""
    problem, load = formulation.problem, formulation.fleet.workload
    counts = solution.counts or {}
    found = loads(problem, counts, solution.passed[0])
    routes = {(route.source, route.target): route for route in problem.routes}
    parts = []
    error = 0.0
    for one in solution.passed[0]:
        candidate, taker = problem.candidates[one.prefill], problem.candidates[one.decode]
        setup = formulation.setups[candidate.name]
        times = [time / setup.part for time in setup.service]
        mine = found[one.prefill]
        mean, scv = variation(times, mine.rates)
        after = times[one.bucket]
        if candidate.role == "prefill":
            step = usual_step(formulation, formulation.setups[taker.name], found[one.decode])
            after += routes[candidate.pool, taker.pool].adds(candidate, one.bucket) + step.seconds
        parts.append(_Part(one.rate, after, mine.busy[0], mine.count, mean, (load.burstiness + scv) / 2))
        error = max(error, setup.rates[one.bucket].error)
    return Times(*(_range(_percentile(parts, share), error) for share in (0.5, 0.99)))


def _percentile(parts: Sequence[_Part], share: float) -> float:
    total = sum(part.rate for part in parts)
    low, high = 0.0, max((part.after for part in parts), default=0.0) + 1e-9

    def beyond(seconds: float) -> float:
        return sum(part.rate * part.longer(seconds) for part in parts) / total

    while beyond(high) > 1 - share:
        high *= 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if beyond(middle) > 1 - share else (low, middle)
    return high


def usual_step(formulation: Formulation, setup: Setup, load: Load) -> Rate:
    """A decode step with as many sequences as there usually are, of a decode engine."""
    context = _context(formulation, load)
    tokens = sum(r * b.output for r, b in zip(load.rates, formulation.fleet.workload.buckets, strict=True))
    return setup.source.decode(_sequences(setup, context, tokens / load.count, 0.0), context)


def next_token(formulation: Formulation, solution: Solution) -> Times:
    """The time of each further token: at the mean number of sequences of a step, and at a number that is rarely
    exceeded. In an aggregated engine prefill takes its part of some steps."""
    problem = formulation.problem
    found = loads(problem, solution.counts or {}, solution.passed[0])
    middle, worst, weight, error = 0.0, 0.0, 0.0, 0.0
    for k, mine in found.items():
        candidate = problem.candidates[k]
        if candidate.role == "prefill" or not any(mine.rates):
            continue
        setup = formulation.setups[candidate.name]
        context = _context(formulation, mine)
        piece = setup.part * _limit(formulation) if candidate.role == "both" else 0.0
        tokens = sum(r * b.output for r, b in zip(mine.rates, formulation.fleet.workload.buckets, strict=True))
        usual = _sequences(setup, context, tokens / mine.count, piece * mine.busy[0])
        most = min(float(setup.batch), usual + 2.33 * usual**0.5)
        rate = setup.source.decode(usual, context)
        middle += tokens * (rate.seconds + piece * mine.busy[0])
        worst = max(worst, setup.source.decode(most, context).seconds + piece)
        weight += tokens
        error = max(error, rate.error)
    return Times(_range(middle / weight if weight else 0.0, error), _range(worst, error))


def _sequences(setup: Setup, context: float, tokens: float, piece: float) -> float:
    """How many sequences a step has that gives so many tokens a second: with more of them a step takes longer, so there
    are more of them."""
    low, high = 1.0, float(setup.batch)
    for _ in range(40):
        middle = (low + high) / 2
        if middle < tokens * (setup.source.decode(middle, context).seconds + piece):
            low = middle
        else:
            high = middle
    return high


def _limit(formulation: Formulation) -> float:
    return formulation.fleet.service.tpot * (1 - formulation.fleet.service.margin)


def _context(formulation: Formulation, load: Load) -> float:
    weighted = [
        (rate * bucket.output, bucket.prompt + bucket.output / 2)
        for rate, bucket in zip(load.rates, formulation.fleet.workload.buckets, strict=True)
    ]
    return sum(w * context for w, context in weighted) / sum(w for w, _ in weighted)


def _range(value: float, error: float) -> Range:
    return Range(value, value / (1 + error), value * (1 + error))


def headroom(
    problem: Problem, counts: Mapping[int, int], growing: int | None = None, effort: Effort | None = None
) -> float:
    """By what all rates, or those of one bucket, may be multiplied before these engines no longer suffice."""
    model = program.build(problem, scale="all", growing=None if growing is None else {growing}, counts=counts)
    assert model.theta is not None
    answer = highs.solve(model.program, {model.theta: 1.0}, maximise=True, effort=effort)
    return answer.value if answer.values else 0.0


def slowest_links(problem: Problem, counts: Mapping[int, int], effort: Effort | None = None) -> float:
    """The part of their bandwidth that all links may fall to, to two digits."""

    def possible(part: float) -> bool:
        links = tuple(replace(link, capacity=link.capacity * part) for link in problem.links)
        routes = tuple(replace(r, seconds=tuple(s / part for s in r.seconds)) for r in problem.routes)
        model = program.build(replace(problem, links=links, routes=routes), counts=counts)
        return bool(highs.solve(model.program, {}, effort=effort).values)

    low, high = 0.001, 1.0
    if possible(low):
        return 0.0
    while high / low > 1.02:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if possible(middle) else (middle, high)
    return high


def setups(formulation: Formulation, counts: Mapping[int, int]) -> list[tuple[int, Setup, int]]:
    return [(k, formulation.setups[formulation.problem.candidates[k].name], n) for k, n in sorted(counts.items())]
