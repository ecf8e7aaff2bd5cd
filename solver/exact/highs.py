"""A mixed-integer program, row by row, and HiGHS to solve it. The only module that knows the library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from deeplink.errors import SolverError

INFINITY = float("inf")
Status = Literal["optimal", "feasible", "infeasible", "unknown"]


@dataclass(slots=True)
class Program:
    """Columns with bounds and rows of coefficients; filled by `column` and `row`, both of which answer its number."""

    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    row_lower: list[float] = field(default_factory=list)
    row_upper: list[float] = field(default_factory=list)
    row_names: list[str] = field(default_factory=list)
    start: list[int] = field(default_factory=lambda: [0])
    index: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)

    def column(self, lower: float = 0.0, upper: float = INFINITY, *, integer: bool = False) -> int:
        self.lower.append(lower)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.lower) - 1

    def row(self, terms: Mapping[int, float], lower: float, upper: float, name: str = "") -> int:
        for column, value in terms.items():
            if value != 0.0:
                self.index.append(column)
                self.value.append(value)
        self.start.append(len(self.index))
        self.row_lower.append(lower)
        self.row_upper.append(upper)
        self.row_names.append(name)
        return len(self.row_lower) - 1


@dataclass(frozen=True, slots=True)
class Answer:
    """`bound` is what no solution can beat; `gap` is the distance to it, relative. `values` are empty when there is no
    solution."""

    status: Status
    value: float
    bound: float
    values: tuple[float, ...] = ()

    @property
    def gap(self) -> float:
        return abs(self.value - self.bound) / max(abs(self.value), 1e-9)


@dataclass(frozen=True, slots=True)
class Effort:
    """When to stop: at a proven relative `gap`, after `nodes` of the search tree, or after `seconds`. Only the last
    depends on the machine."""

    gap: float = 1e-4
    seconds: float = 60.0
    nodes: int = 1_000_000_000


def solve(
    program: Program,
    objective: Mapping[int, float],
    *,
    maximise: bool = False,
    effort: Effort | None = None,
    start: Sequence[float] = (),
) -> Answer:
    """One thread and a fixed seed, so that the same program has the same answer. Raises SolverError when HiGHS gives up
    in a way that says nothing about the program."""
    effort = effort or Effort()
    if not program.lower:  # which HiGHS calls empty, whatever the rows say
        holds = all(low <= 0 <= high for low, high in zip(program.row_lower, program.row_upper, strict=True))
        return Answer("optimal" if holds else "infeasible", 0.0, 0.0)
    solver = _load(program, objective, maximise, relaxed=False)
    solver.setOptionValue("mip_rel_gap", effort.gap)
    solver.setOptionValue("time_limit", effort.seconds)
    solver.setOptionValue("mip_max_nodes", effort.nodes)
    if len(start):
        solution = _highspy().HighsSolution()
        solution.col_value = list(start)
        solver.setSolution(solution)
    solver.run()
    kinds = _highspy().HighsModelStatus
    status = solver.getModelStatus()
    info = solver.getInfo()
    if status == kinds.kInfeasible:
        return Answer("infeasible", 0.0, 0.0)
    if status in (kinds.kUnboundedOrInfeasible, kinds.kUnbounded):
        raise SolverError(
            "the program has no bound", remedy="report it: every objective here is bounded by the inventory"
        )
    found = info.primal_solution_status == _highspy().SolutionStatus.kSolutionStatusFeasible
    values = tuple(solver.getSolution().col_value) if found else ()
    bound = info.mip_dual_bound if any(program.integer) else info.objective_function_value
    if status == kinds.kOptimal:
        return Answer("optimal", info.objective_function_value, bound, values)
    if status in (kinds.kTimeLimit, kinds.kSolutionLimit, kinds.kInterrupt, kinds.kIterationLimit):
        return Answer("feasible" if found else "unknown", info.objective_function_value, bound, values)
    raise SolverError(f"HiGHS ended with {solver.modelStatusToString(status)}")


def duals(program: Program, objective: Mapping[int, float], *, maximise: bool = False) -> dict[int, float]:
    """By how much the relaxed program's optimum changes with each row's bound; only rows where it does."""
    solver = _load(program, objective, maximise, relaxed=True)
    solver.run()
    if not program.lower or solver.getModelStatus() != _highspy().HighsModelStatus.kOptimal:
        return {}
    return {row: dual for row, dual in enumerate(solver.getSolution().row_dual) if abs(dual) > 1e-9}


def _highspy() -> Any:
    try:
        import highspy
    except ImportError as exc:
        raise SolverError("the solver needs HiGHS", remedy="pip install 'deeplink[solver]'") from exc
    return highspy


def _quiet() -> Any:
    """A solver that prints nothing. The first one of a process greets on standard output, which may be for JSON, as
    soon as callbacks are enabled, which its constructor does."""

    class Quiet(_highspy().Highs):  # type: ignore[misc]
        def enableCallbacks(self) -> None:
            self.silent()
            super().enableCallbacks()

    return Quiet()


def _load(program: Program, objective: Mapping[int, float], maximise: bool, *, relaxed: bool) -> Any:
    highspy = _highspy()
    columns, rows = len(program.lower), len(program.row_lower)
    cost = np.zeros(columns)
    for column, value in objective.items():
        cost[column] = value
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = columns, rows
    lp.col_cost_ = cost
    lp.col_lower_, lp.col_upper_ = np.array(program.lower), np.array(program.upper)
    lp.row_lower_, lp.row_upper_ = np.array(program.row_lower), np.array(program.row_upper)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.array(program.start, dtype=np.int32)
    lp.a_matrix_.index_ = np.array(program.index, dtype=np.int32)
    lp.a_matrix_.value_ = np.array(program.value)
    lp.sense_ = highspy.ObjSense.kMaximize if maximise else highspy.ObjSense.kMinimize
    if not relaxed:
        kinds = highspy.HighsVarType
        lp.integrality_ = [kinds.kInteger if integer else kinds.kContinuous for integer in program.integer]
    solver = _quiet()
    solver.setOptionValue("parallel", "off")
    solver.setOptionValue("random_seed", 0)
    solver.setOptionValue("mip_feasibility_tolerance", 1e-7)
    solver.passModel(lp)
    return solver
