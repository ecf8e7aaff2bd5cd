"""Where there is no placement: what would have to be different for there to be one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from deeplink.solver.exact import highs, program
from deeplink.solver.exact.highs import Effort
from deeplink.solver.exact.problem import Pool, Problem

MOST = 1e4
"""Relaxations are looked for up to this multiple."""
_GAP = 0.01
_SECONDS = 10.0
"""For each of the many programs of a relaxation: what would be enough need not be known to a part in ten thousand."""


@dataclass(frozen=True, slots=True)
class Relaxation:
    """If only this were so, there would be a placement. `factor` is how much more (or longer, or less) of it."""

    what: str
    factor: float
    text: str


def relaxations(problem: Problem, effort: Effort) -> tuple[Relaxation, ...]:
    """What would have to be different, each thing alone and as little as possible, smallest first."""
    effort = Effort(max(effort.gap, _GAP), min(effort.seconds, _SECONDS))
    found: list[Relaxation] = []
    rate = _largest(problem, effort)
    if 0 < rate < 1:
        found.append(Relaxation("rate", 1 / rate, f"serve {rate:.1%} of the workload's rate"))
    more = _smallest(
        lambda factor: replace(problem, pools=tuple(_more(pool, factor) for pool in problem.pools)), effort
    )
    if more:
        found.append(Relaxation("inventory", more, f"{more:.3g} times the chips in every pool"))
    if problem.ttft < highs.INFINITY:
        slower = _smallest(lambda factor: replace(problem, ttft=problem.ttft * factor), effort)
        if slower:
            found.append(
                Relaxation("ttft", slower, f"a first token within {problem.ttft * slower:.3g} s by these engines")
            )
    if problem.links:
        faster = _smallest(lambda factor: _linked(problem, factor), effort)
        if faster:
            found.append(Relaxation("links", faster, f"{faster:.3g} times the bandwidth of every link"))
    if problem.budget < highs.INFINITY:
        dearer = _smallest(lambda factor: replace(problem, budget=problem.budget * factor), effort)
        if dearer:
            found.append(Relaxation("budget", dearer, f"a budget of {problem.budget * dearer:.4g} an hour"))
    for index, scenario in enumerate(problem.scenarios[1:], 1):
        without = problem.scenarios[:index] + problem.scenarios[index + 1 :]
        if possible(replace(problem, scenarios=without), effort):
            found.append(Relaxation("scenario", 1.0, f"no need to cope with {scenario.name!r}"))
    return tuple(sorted(found, key=lambda one: (one.factor, one.what)))


def _largest(problem: Problem, effort: Effort) -> float:
    model = program.build(problem, scale="all")
    assert model.theta is not None
    answer = highs.solve(model.program, {model.theta: 1.0}, maximise=True, effort=effort)
    return answer.value if answer.values else 0.0


def possible(problem: Problem, effort: Effort) -> bool:
    """Whether there is a placement; False also when none was found in time."""
    return bool(highs.solve(program.build(problem).program, {}, effort=effort).values)


def _smallest(change: Callable[[float], Problem], effort: Effort) -> float:
    """The smallest factor, to two digits, with which there is a placement; 0 if there is none up to `MOST`."""
    low, high = 1.0, 2.0
    while not possible(change(high), effort):
        low, high = high, high * 4
        if high > MOST:
            return 0.0
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if possible(change(middle), effort) else (middle, high)
    return high


def _more(pool: Pool, factor: float) -> Pool:
    count = int(pool.count * factor)
    hosts = tuple((size, min(count, int(chips * factor) // size * size)) for size, chips in pool.aligned)
    return replace(pool, count=count, aligned=hosts)


def _linked(problem: Problem, factor: float) -> Problem:
    links = tuple(replace(link, capacity=link.capacity * factor) for link in problem.links)
    routes = tuple(replace(r, seconds=tuple(s / factor for s in r.seconds)) for r in problem.routes)
    return replace(problem, links=links, routes=routes)
