"""What more of the rate costs: the cheapest placement for each of several rates up to the most that can be served."""

from __future__ import annotations

from dataclasses import dataclass, replace

from deeplink.solver.exact import highs, program
from deeplink.solver.exact.highs import Effort
from deeplink.solver.exact.problem import Problem
from deeplink.solver.exact.solve import Solution, solve


@dataclass(frozen=True, slots=True)
class Point:
    """`rate` is a multiple of the workload's."""

    rate: float
    solution: Solution


def scaled(problem: Problem, factor: float) -> Problem:
    """The same at `factor` times the rate, in every scenario."""
    return replace(problem, rates=tuple(rate * factor for rate in problem.rates))


def front(problem: Problem, points: int = 10, effort: Effort | None = None) -> tuple[Point, ...]:
    """Points that no placement beats in both rate and cost (up to the proven gap), evenly spaced in the rate. Empty
    when nothing can be served at all."""
    model = program.build(problem, scale="all")
    assert model.theta is not None
    answer = highs.solve(model.program, {model.theta: 1.0}, maximise=True, effort=effort)
    if not answer.values or answer.value <= 0:
        return ()
    most = answer.value * (1 - 1e-6)
    found: list[Point] = []
    for index in range(points, 0, -1):
        rate = most * index / points
        solution = solve(scaled(problem, rate), "cost", effort, nicest=False)
        if solution.status != "infeasible":
            found.append(Point(rate, solution))
    return tuple(reversed(found))
