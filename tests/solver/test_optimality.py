"""The exact core equals trying everything, on random problems and on the corners."""

from __future__ import annotations

from dataclasses import replace

import exhaustive
import pytest
import random_problems

from deeplink.solver.problem import useful
from deeplink.solver.solve import solve

BLOCKS, EACH = 20, 12


@pytest.mark.parametrize("block", range(BLOCKS))
def test_equal_to_trying_everything(block: int) -> None:
    for seed in range(block * EACH, (block + 1) * EACH):
        problem = random_problems.problem(seed)
        small = replace(problem, candidates=useful(problem))
        objective = ("cost", "throughput", "capacity", "energy", "latency")[seed % 5]
        wanted = {
            "cost": lambda p: exhaustive.cheapest(p),
            "energy": lambda p: exhaustive.cheapest(p, exhaustive.watts),
            "throughput": lambda p: exhaustive.most(p, everywhere=False),
            "capacity": lambda p: exhaustive.most(p, everywhere=True),
            "latency": exhaustive.quickest,
        }[objective](problem)
        found = solve(small, objective)
        if wanted is None:
            assert found.status == "infeasible", seed
        elif not any(problem.rates):
            assert found.status != "infeasible", seed
        else:
            assert found.status == "optimal", seed
            assert found.value == pytest.approx(wanted, rel=2e-5, abs=1e-6), (seed, objective)
