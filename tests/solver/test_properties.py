"""What must hold of any problem, whatever its numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import random_problems
from hypothesis import given, settings
from hypothesis import strategies as st

from deeplink.solver.exact.pareto import front, scaled
from deeplink.solver.exact.problem import Problem, useful
from deeplink.solver.exact.solve import Solution, solve

SEEDS = st.integers(0, 10_000)
TIGHT = 1e-4


def value(problem: Problem, objective: str = "capacity") -> float:
    found = solve(problem, objective)  # type: ignore[arg-type]
    return 0.0 if found.status == "infeasible" else found.value


def cost(problem: Problem) -> float:
    found = solve(problem, "cost")
    return float("inf") if found.status == "infeasible" else found.value


@settings(max_examples=25)
@given(SEEDS, st.integers(0, 1))
def test_a_chip_more_never_hurts(seed: int, which: int) -> None:
    problem = random_problems.problem(seed)
    pools = list(problem.pools)
    index = which % len(pools)
    pool = pools[index]
    pools[index] = replace(pool, count=pool.count + 1, aligned=tuple((s, n) for s, n in pool.aligned))
    more = replace(problem, pools=tuple(pools))
    assert value(more) >= value(problem) * (1 - TIGHT)
    assert cost(more) <= cost(problem) * (1 + TIGHT)


@settings(max_examples=25)
@given(SEEDS)
def test_more_to_serve_is_never_cheaper(seed: int) -> None:
    problem = random_problems.problem(seed)
    assert cost(scaled(problem, 1.3)) >= cost(problem) * (1 - TIGHT)


@settings(max_examples=25)
@given(SEEDS)
def test_a_shorter_time_is_never_cheaper(seed: int) -> None:
    problem = random_problems.problem(seed)
    assert cost(replace(problem, ttft=problem.ttft * 0.7)) >= cost(problem) * (1 - TIGHT)


@settings(max_examples=25)
@given(SEEDS)
def test_a_faster_link_never_hurts(seed: int) -> None:
    problem = random_problems.problem(seed)
    links = tuple(replace(link, capacity=link.capacity * 2) for link in problem.links)
    routes = tuple(replace(r, seconds=tuple(s / 2 for s in r.seconds)) for r in problem.routes)
    assert cost(replace(problem, links=links, routes=routes)) <= cost(problem) * (1 + TIGHT)


@settings(max_examples=25)
@given(SEEDS)
def test_what_is_left_out_changes_nothing(seed: int) -> None:
    problem = random_problems.problem(seed)
    assert cost(replace(problem, candidates=useful(problem))) == pytest.approx(cost(problem), rel=TIGHT)


def served(problem: Problem, solution: Solution, scenario: int) -> list[float]:
    found = [0.0] * len(problem.rates)
    for one in solution.passed[scenario]:
        found[one.bucket] += one.rate
    return found


@settings(max_examples=40)
@given(SEEDS)
def test_a_solution_is_what_it_says(seed: int) -> None:
    """Checked row by row from the problem, not from the program."""
    problem = random_problems.problem(seed)
    found = solve(problem, "cost")
    if found.status == "infeasible":
        for relaxation in found.relaxations:
            assert relaxation.factor >= 1
        return
    counts = found.counts or {}
    for p, pool in enumerate(problem.pools):
        assert (
            sum(problem.candidates[k].chips * n for k, n in counts.items() if problem.candidates[k].pool == p)
            <= pool.count
        )
    assert sum(problem.price(problem.candidates[k]) * n for k, n in counts.items()) == pytest.approx(
        found.value, abs=1e-4
    )
    for s, scenario in enumerate(problem.scenarios):
        assert served(problem, found, s) == pytest.approx(
            [rate * scenario.rate for rate in problem.rates], rel=1e-4, abs=1e-6
        )
        for k, candidate in enumerate(problem.candidates):
            rates = [0.0] * len(problem.rates)
            for one in found.passed[s]:
                if k == (one.decode if candidate.role == "decode" else one.prefill):
                    rates[one.bucket] += one.rate
                    assert candidate.serves[one.bucket]
            if any(rates):
                shares = candidate.shares(counts[k])
                for r, use in enumerate(candidate.uses):
                    load = sum(u * rate for u, rate in zip(use, rates, strict=True))
                    assert load <= counts[k] * shares[r] * scenario.available[candidate.pool] + 1e-6


@settings(max_examples=10)
@given(SEEDS)
def test_the_same_twice(seed: int) -> None:
    problem = random_problems.problem(seed)
    assert solve(problem, "cost") == solve(problem, "cost")


@settings(max_examples=8)
@given(SEEDS)
def test_a_front_rises(seed: int) -> None:
    points = front(random_problems.problem(seed), 4)
    costs = [point.solution.value for point in points]
    assert costs == sorted(costs)
    assert [point.rate for point in points] == sorted(point.rate for point in points)


@settings(max_examples=25)
@given(SEEDS)
def test_a_relaxation_is_enough(seed: int) -> None:
    """Where nothing serves all of it, the part of the rate that is named can be served."""
    problem = random_problems.problem(seed)
    problem = scaled(problem, 3.0)
    found = solve(problem, "cost")
    for relaxation in found.relaxations:
        if relaxation.what == "rate":
            assert cost(scaled(problem, 1 / relaxation.factor * (1 - 1e-5))) < float("inf")
        if relaxation.what == "ttft":
            assert cost(replace(problem, ttft=problem.ttft * relaxation.factor)) < float("inf")
