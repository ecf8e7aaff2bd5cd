"""One random case, solved both ways."""

from __future__ import annotations

import math
from dataclasses import replace

import exhaustive
import random_problems

from deeplink.solver.exact.problem import Objective, useful
from deeplink.solver.exact.solve import solve

OBJECTIVES: tuple[Objective, ...] = ("cost", "throughput", "capacity", "energy", "latency")


def by_trying(seed: int) -> float | None:
    problem, objective = random_problems.problem(seed), OBJECTIVES[seed % len(OBJECTIVES)]
    if objective == "cost":
        return exhaustive.cheapest(problem)
    if objective == "energy":
        return exhaustive.cheapest(problem, exhaustive.watts)
    if objective == "latency":
        return exhaustive.quickest(problem)
    return exhaustive.most(problem, everywhere=objective == "capacity")


def equal(seed: int) -> bool:
    """Whether the solver finds just as good a placement as trying all of them, proves it, and there is none if so."""
    problem = random_problems.problem(seed)
    found = solve(replace(problem, candidates=useful(problem)), OBJECTIVES[seed % len(OBJECTIVES)])
    wanted = by_trying(seed)
    if wanted is None:
        return found.status == "infeasible"
    return found.status == "optimal" and math.isclose(found.value, wanted, rel_tol=2e-5, abs_tol=1e-6)
