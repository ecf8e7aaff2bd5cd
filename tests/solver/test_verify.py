"""What the simulator finds too slow is planned again, less busy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from described import FLEET, write

from deeplink.solver import verify
from deeplink.solver.exact.replayed import Replayed
from deeplink.solver.exact.solve import solve
from deeplink.solver.fleets import fleetfile, trace
from deeplink.solver.fleets.candidates import formulate
from deeplink.solver.fleets.fleet import Request


def test_tightened_until_it_is_in_time(tmp_path: Path) -> None:
    """The file says that requests come evenly; they do not."""
    text = FLEET.replace("rate = 6", "rate = 20\nburstiness = 0.0").replace("count = 8", "count = 32")
    fleet = fleetfile.load(write(tmp_path, text))
    formulation = formulate(fleet)
    real = trace.made(replace(fleet.workload, burstiness=12.0), 8000, 1)
    first = solve(formulation.problem, "cost")
    before = verify.judge(formulation, verify.run(formulation, first, real))
    assert before.attained < 0.99
    _, solution, after = verify.verified(formulation, real)
    assert after is not None
    assert after.attained > before.attained
    assert after.rounds >= 1
    assert solution.value > first.value


def test_the_rate_that_is_sustained(tmp_path: Path) -> None:
    fleet = fleetfile.load(write(tmp_path))
    formulation = formulate(fleet)
    solution = solve(formulation.problem, "cost")
    requests = trace.made(fleet.workload, 4000, 2)
    found = verify.sustained(formulation, solution, requests)
    assert found.attained >= 0.99
    faster = trace.scaled(requests, found.multiple * 1.15)
    assert verify.judge(formulation, verify.run(formulation, solution, faster)).attained < 0.99


def test_replayed_knows_bunches() -> None:
    """A hundred at once, every hundred seconds, is worse than one a second, which both arrive at the same rate."""
    evenly = Replayed([float(i) for i in range(5000)], [1.0] * 5000, 0.99)
    bunched = Replayed([float(i // 100 * 100) for i in range(5000)], [1.0] * 5000, 0.99)
    assert evenly.usable(1.0, 4, 1.0) == pytest.approx(0.95)
    assert bunched.usable(1.0, 4, 1.0) < 0.2
    for wait in (0.5, 2.0, 8.0):
        assert bunched.usable(wait, 4, 1.0) <= bunched.usable(2 * wait, 4, 1.0)


def test_a_trace_makes_buckets_that_it_falls_into() -> None:
    requests = [Request(float(i), 10 * (i + 1), 5) for i in range(200)]
    load = trace.workload(requests, buckets=4, hits=0.0, source="here")
    bucket = trace.bucket_of(load.buckets)
    shares = [0.0] * len(load.buckets)
    for request in requests:
        shares[bucket(request)] += 1 / len(requests)
    assert shares == pytest.approx([b.share for b in load.buckets])
    assert trace.burst(requests) == pytest.approx(1.0)
    assert load.rate == pytest.approx(1.0)
    assert load.burstiness == pytest.approx(0.0, abs=1e-9)
