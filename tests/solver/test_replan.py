"""The least that has to change when the workload does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from described import FLEET, write

from deeplink.cli import main
from deeplink.errors import SolverError
from deeplink.solver.fleets import fleetfile
from deeplink.solver.fleets.candidates import formulate
from deeplink.solver.fleets.fleet import Fleet
from deeplink.solver.place import place
from deeplink.solver.placement import Placement
from deeplink.solver.replan import Observed, replan

BUCKET = "2000/300"


@pytest.fixture(scope="module")
def solved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Fleet, Placement]:
    fleet = fleetfile.load(write(tmp_path_factory.mktemp("fleet"), FLEET.replace("count = 8", "count = 16")))
    return fleet, place(fleet)


def test_as_planned(solved: tuple[Fleet, Placement]) -> None:
    assert replan(*solved, Observed({BUCKET: 6.0})).step == "nothing"
    assert replan(*solved, Observed({BUCKET: 3.0})).step == "nothing"


def test_more_than_planned(solved: tuple[Fleet, Placement]) -> None:
    fleet, placement = solved
    found = replan(fleet, placement, Observed({BUCKET: 14.0}))
    assert found.step == "engines"
    assert found.moved >= 1
    assert sum(route.rate for route in found.routes) == pytest.approx(14.0, rel=1e-4)
    assert "requests/s" in found.why[0]
    assert sum(found.engines.values()) > sum(engine.count for engine in placement.engines)


def test_longer_prompts_take_more_of_each_step(tmp_path: Path) -> None:
    """One engine that does both: first mostly answers, then mostly prompts, for which its steps need other limits."""
    text = FLEET[: FLEET.index('[[pools]]\nname = "h20"')].replace("ttft = 3.0", "ttft = 12.0").replace("= 6", "= 4")
    text = text.replace("tp = [2]", 'tp = [2]\nroles = ["both"]').replace("count = 8", "count = 2")
    few_long = (
        "prompt = 8000\noutput = 20\nshare = 0.05\n[[workload.lengths]]\nprompt = 100\noutput = 500\nshare = 0.95"
    )
    fleet = fleetfile.load(write(tmp_path, text.replace("prompt = 2000\noutput = 300", few_long)))
    placement = place(fleet)
    (engine,) = placement.engines
    # Requests may wait longer than planned: the same engine, of which the router need not even know.
    found = replan(fleet, placement, Observed({"8000/20": 0.5, "100/500": 1.0}))
    assert (found.step, found.moved) == ("weights", 0)
    assert dict(found.engines) == {engine.name: 1}
    assert {(route.prefill, route.decode, route.weight) for route in found.routes} == {(engine.name, engine.name, 1.0)}
    found = replan(fleet, placement, Observed({"8000/20": 0.8, "100/500": 1.0}))
    assert (found.step, found.moved) == ("batch", 1)
    (name,) = found.engines
    setup = formulate(fleet, keep=frozenset({name})).setups[name]
    assert setup.batch < engine.max_num_seqs
    assert setup.chunk > engine.max_num_batched_tokens
    assert sum(found.engines.values()) == engine.count


def test_more_than_there_is(solved: tuple[Fleet, Placement]) -> None:
    assert replan(*solved, Observed({BUCKET: 600.0})).step == "impossible"


def test_slower_than_predicted(solved: tuple[Fleet, Placement]) -> None:
    found = replan(*solved, Observed({BUCKET: 6.0}, tpot_p99=1.0))
    assert found.step == "weights"
    assert sum(route.weight for route in found.routes) == pytest.approx(1, abs=1e-5)
    assert {name for route in found.routes for name in (route.prefill, route.decode)} == set(found.engines)
    assert "further token" in found.why[0]


def test_a_pool_that_is_gone(solved: tuple[Fleet, Placement]) -> None:
    found = replan(*solved, Observed({BUCKET: 6.0}, lost={"h20": 16}))
    assert found.step in ("engines", "placement")
    assert all(name.startswith("hopper") for name in found.engines)


def test_the_placement_of_another_fleet(solved: tuple[Fleet, Placement]) -> None:
    fleet, placement = solved
    with pytest.raises(SolverError, match="not of this fleet"):
        replan(replace(fleet, pools=fleet.pools[:1], connections=()), placement, Observed({BUCKET: 14.0}))


def test_engines_of_another_kind_are_others(solved: tuple[Fleet, Placement]) -> None:
    fleet, placement = solved
    used = {engine.pool for engine in placement.engines}
    pools = tuple(replace(pool, engine="sglang") if pool.name in used else pool for pool in fleet.pools)
    with pytest.raises(SolverError, match="not of this fleet") as caught:
        replan(replace(fleet, pools=pools), placement, Observed({}))
    assert (caught.value.ours, caught.value.theirs) == ("sglang", "vllm")


def test_some_chips_gone(solved: tuple[Fleet, Placement]) -> None:
    found = replan(*solved, Observed({BUCKET: 6.0}, lost={"h20": 2}))
    assert found.step in ("roles", "engines")
    assert found.moved == 0


def test_a_bucket_that_is_none(solved: tuple[Fleet, Placement]) -> None:
    with pytest.raises(SolverError, match="no bucket"):
        replan(*solved, Observed({"colour": 1.0}))


@pytest.mark.parametrize(
    ("seen", "field"),
    [
        (Observed({BUCKET: -1.0}), f"rates.{BUCKET}"),
        (Observed({BUCKET: 1e300}), f"rates.{BUCKET}"),
        (Observed({BUCKET: float("nan")}), f"rates.{BUCKET}"),
        (Observed({BUCKET: 6.0}, ttft_p99=-1.0), "ttft_p99"),
        (Observed({BUCKET: 6.0}, tpot_p99=float("inf")), "tpot_p99"),
        (Observed({BUCKET: 6.0}, lost={"nowhere": 1}), "lost"),
        (Observed({BUCKET: 6.0}, lost={"h20": -1}), "lost.h20"),
        (Observed({BUCKET: 6.0}, lost={"h20": 17}), "lost.h20"),
    ],
)
def test_what_cannot_be_seen(solved: tuple[Fleet, Placement], seen: Observed, field: str) -> None:
    with pytest.raises(SolverError) as raised:
        replan(*solved, seen)
    assert raised.value.field == field
    assert raised.value.remedy


def test_the_command(tmp_path: Path) -> None:
    run = CliRunner()
    fleet, placement, seen = str(write(tmp_path)), tmp_path / "p.json", tmp_path / "seen.json"
    assert run.invoke(main, ["solve", fleet, "--out", str(placement)]).exit_code == 0
    for rate, step, code in ((6.0, "nothing", 0), (600.0, "impossible", 1)):
        seen.write_text(json.dumps({"rates": {BUCKET: rate}}))
        found = run.invoke(main, ["replan", fleet, str(placement), str(seen), "--json"])
        assert (json.loads(found.output)["step"], found.exit_code) == (step, code)
    assert "deeplink solve says" in run.invoke(main, ["replan", fleet, str(placement), str(seen)]).output
    seen.write_text("[]")
    assert run.invoke(main, ["replan", fleet, str(placement), str(seen)]).exit_code == 2
