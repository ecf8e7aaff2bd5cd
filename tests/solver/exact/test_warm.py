"""A search that starts from what runs finds what any search finds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest
import random_problems
from hypothesis import given, settings
from hypothesis import strategies as st

from deeplink.solver.exact import program, warm
from deeplink.solver.exact.problem import Candidate, Problem
from deeplink.solver.exact.solve import solve

SEEDS = st.integers(0, 10_000)


def kind(candidate: Candidate) -> tuple[int, str, int]:
    return candidate.pool, candidate.role, candidate.chips


def with_running(problem: Problem, counts: Mapping[int, int]) -> Problem:
    running: Counter[tuple[int, str, int]] = Counter()
    for k, count in counts.items():
        running[kind(problem.candidates[k])] += count
    return replace(problem, candidates=tuple(replace(c, current=running[kind(c)]) for c in problem.candidates))


@settings(max_examples=25)
@given(SEEDS, st.integers(0, 3))
def test_the_answer_does_not_depend_on_it(seed: int, one: int) -> None:
    problem = random_problems.problem(seed)
    if not problem.candidates:
        return
    cold = solve(problem, "cost")
    running = with_running(problem, {one % len(problem.candidates): 2})
    found = solve(running, "cost")
    assert found.status == cold.status
    assert found.value == pytest.approx(cold.value)


@settings(max_examples=25)
@given(SEEDS)
def test_what_runs_and_is_enough_is_where_it_starts(seed: int) -> None:
    problem = random_problems.problem(seed)
    found = solve(problem, "cost")
    if not found.counts:
        return
    running = with_running(problem, found.counts)
    model = program.build(running)
    begin = warm.start(model, model.cost, maximise=False)
    used: Counter[tuple[int, str, int]] = Counter()
    for k, columns in enumerate(model.engines):
        used[kind(running.candidates[k])] += sum(round(begin[column]) for column in columns)
    assert all(count <= next(c.current for c in running.candidates if kind(c) == of) for of, count in used.items())
    cost = sum(value * begin[column] for column, value in model.cost.items())
    assert cost >= found.value - 1e-6
    assert cost <= found.value * 1.05 + 1e-6 or math.isclose(cost, found.value), "within the gap that is enough"


def test_nothing_that_runs_is_no_start() -> None:
    model = program.build(random_problems.problem(1))
    assert warm.start(model, model.cost, maximise=False) == ()
