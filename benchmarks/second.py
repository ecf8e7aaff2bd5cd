"""The same programs by solvers of others, which come with OR-Tools: SCIP, which has fractions as HiGHS has, and CP-SAT,
which has whole numbers only.

For CP-SAT every flow of requests is counted in a millionth of the most there can be, every row is multiplied until its
numbers are large, and rounded; and each row is loosened by as much as all of this rounding can have changed it. So what
CP-SAT finds can only be cheaper than the program's optimum, never dearer: where it is as dear as what HiGHS found,
nothing cheaper exists.
"""

from __future__ import annotations

import math
from typing import Any

from deeplink.solver.exact.program import Model

SECONDS = 120.0
_UNITS = 1_000_000
_LARGEST = 1e16
"""Of a row's activity, so that 64 bits hold it with room."""
_ENGINES = 100
"""More than there can be of one candidate."""
_MONEY = 1e6


class Undecided(Exception):
    """The other solver ended without an answer."""


def scip(builder: Any, model: Model) -> float | None:
    """By `ortools.linear_solver.python.model_builder`; None when there is no solution."""
    rows, copy = model.program, builder.Model()
    columns = [
        (copy.new_int_var if integer else copy.new_num_var)(low, high, f"c{index}")
        for index, (low, high, integer) in enumerate(zip(rows.lower, rows.upper, rows.integer, strict=True))
    ]
    for row, (low, high) in enumerate(zip(rows.row_lower, rows.row_upper, strict=True)):
        terms = [value * columns[column] for column, value in _terms(model, row)]
        if terms:
            copy.add_linear_constraint(sum(terms), low, high)
    copy.minimize(sum(value * columns[column] for column, value in model.cost.items()))
    solver = builder.Solver("scip")
    solver.set_time_limit_in_seconds(SECONDS)
    status = solver.solve(copy)
    if status == builder.SolveStatus.INFEASIBLE:
        return None
    if status != builder.SolveStatus.OPTIMAL:
        raise Undecided(f"SCIP ended with {status}")
    return float(solver.objective_value)


def cp_sat(cp_model: Any, model: Model) -> float | None:
    """By `ortools.sat.python.cp_model`: what nothing is cheaper than; None when there is no solution."""
    rows, copy = model.program, cp_model.CpModel()
    problem = model.problem
    most = 2 * sum(problem.rates) * max(scenario.rate for scenario in problem.scenarios)
    columns, units, largest = [], [], []
    for low, high, integer in zip(rows.lower, rows.upper, rows.integer, strict=True):
        unit = 1.0 if integer else most / _UNITS
        top = math.ceil((high if math.isfinite(high) else _ENGINES if integer else most) / unit)
        columns.append(copy.new_int_var(math.floor(low / unit), top, ""))
        units.append(unit)
        largest.append(top)
    for row, (low, high) in enumerate(zip(rows.row_lower, rows.row_upper, strict=True)):
        terms = [(column, value * units[column]) for column, value in _terms(model, row)]
        if not terms:
            continue
        scale = _LARGEST / sum(abs(value) * largest[column] for column, value in terms)
        whole = [(column, round(value * scale)) for column, value in terms]
        loose = 1.0
        for (column, value), (_, rounded) in zip(terms, whole, strict=True):
            loose += abs(value * scale - rounded) * largest[column]
            loose += 0.0 if rows.integer[column] else 0.5 * abs(value * scale)
        copy.add_linear_constraint(
            sum(value * columns[column] for column, value in whole),
            math.floor(low * scale - loose) if math.isfinite(low) else -(1 << 60),
            math.ceil(high * scale + loose) if math.isfinite(high) else 1 << 60,
        )
    copy.minimize(sum(round(value * _MONEY) * columns[column] for column, value in model.cost.items()))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = SECONDS
    solver.parameters.num_workers = 1
    solver.parameters.linearization_level = 2
    status = solver.solve(copy)
    if status == cp_model.INFEASIBLE:
        return None
    if status != cp_model.OPTIMAL:
        raise Undecided(f"CP-SAT ended with {solver.status_name(status)}")
    return float(solver.objective_value) / _MONEY


def _terms(model: Model, row: int) -> list[tuple[int, float]]:
    rows = model.program
    places = range(rows.start[row], rows.start[row + 1])
    return [(rows.index[at], rows.value[at]) for at in places if rows.value[at]]
