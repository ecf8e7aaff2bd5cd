"""Which of the numbers that were not measured decide the answer, and so should be measured next.

The fleet is solved again with the times of one pool as slow, and as fast, as their error allows. If the best placement
then uses other chips or roles, a measurement of that pool is worth something; how much is the difference it makes to
keep today's placement. If with slower times nothing serves the workload at all, the placement hangs on a guess.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from deeplink.errors import SolverError
from deeplink.solver import predict
from deeplink.solver.exact.highs import Effort
from deeplink.solver.exact.solve import Solution, solve
from deeplink.solver.fleets.candidates import Formulation, formulate

_GAP = 0.005
_CERTAIN = 0.05
"""Errors up to this are not looked at."""


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """`error` is that of the pool's times; `slower` and `faster` are the objective if they are as slow or as fast as
    that, None where nothing serves the workload. `changes` says whether the best placement uses other chips or roles
    then. `sustains` is the part of the workload's rate that today's placement still serves if they are slower."""

    pool: str
    error: float
    slower: float | None
    faster: float | None
    changes: bool
    sustains: float


def sensitivities(formulation: Formulation, solution: Solution) -> tuple[Sensitivity, ...]:
    """For each pool whose times are uncertain; those that change the answer first, by how uncertain they are. Nothing
    is said about a pool for which nothing was proven in time."""
    found = []
    for index, pool in enumerate(formulation.fleet.pools):
        error = max(
            (rate.error for setup in formulation.setups.values() if setup.pool == pool.name for rate in setup.rates),
            default=0.0,
        )
        if error > _CERTAIN:
            with contextlib.suppress(SolverError):
                found.append(_sensitivity(formulation, solution, index, error))
    return tuple(sorted(found, key=lambda one: (not one.changes, -one.error, one.pool)))


def _sensitivity(formulation: Formulation, solution: Solution, index: int, error: float) -> Sensitivity:
    fleet = formulation.fleet
    pool = fleet.pools[index]
    effort = Effort(max(fleet.effort.gap, _GAP), fleet.effort.seconds)
    values: list[float | None] = []
    changes = False
    sustains = 1.0
    for pace in (1 + error, 1 / (1 + error)):
        pools = (*fleet.pools[:index], replace(pool, pace=pool.pace * pace), *fleet.pools[index + 1 :])
        other = formulate(replace(fleet, pools=pools))
        best = solve(other.problem, fleet.objective, effort, nicest=False)
        infeasible = best.status == "infeasible"
        values.append(None if infeasible else best.value)
        changes = changes or infeasible or _uses(other, best) != _uses(formulation, solution)
        if pace > 1:
            sustains = _sustains(formulation, other, solution.counts or {})
    return Sensitivity(pool.name, error, values[0], values[1], changes, sustains)


def _uses(formulation: Formulation, solution: Solution) -> set[tuple[int, str]]:
    candidates = formulation.problem.candidates
    return {(candidates[k].pool, candidates[k].role) for k in solution.counts or {}}


def _sustains(formulation: Formulation, other: Formulation, counts: Mapping[int, int]) -> float:
    """What today's engines serve in the other problem. A decode engine's batch is smaller there, so they are matched by
    pool, role and size, each with the best there is of these."""
    alike: dict[tuple[int, str, int], list[int]] = {}
    for k, candidate in enumerate(other.problem.candidates):
        alike.setdefault((candidate.pool, candidate.role, candidate.chips), []).append(k)
    best = 0.0
    choices = max((len(mine) for mine in alike.values()), default=0)
    for choice in range(choices):
        mapped: dict[int, int] = {}
        for k, count in counts.items():
            candidate = formulation.problem.candidates[k]
            mine = alike.get((candidate.pool, candidate.role, candidate.chips), [])
            if mine:
                k_there = mine[min(choice, len(mine) - 1)]
                mapped[k_there] = mapped.get(k_there, 0) + count
        best = max(best, predict.headroom(other.problem, mapped))
    return min(best, 1.0)
