"""From a fleet file to the document, and what the document promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from described import FLEET, write

from deeplink.cli import main
from deeplink.errors import SolverError
from deeplink.kvconnector.contracts import contract as contracts
from deeplink.solver import placement as doc
from deeplink.solver.fleets import fleetfile
from deeplink.solver.place import place

NO_LINK = FLEET[: FLEET.index("[[links]]")]


def solved(folder: Path, text: str = FLEET) -> doc.Placement:
    return place(fleetfile.load(write(folder, text)))


def test_prefill_where_arithmetic_is_cheap(tmp_path: Path) -> None:
    found = solved(tmp_path)
    assert found.status == "optimal"
    assert {(engine.pool, engine.role) for engine in found.engines} == {("hopper", "prefill"), ("h20", "decode")}
    assert found.split is not None
    assert found.split.aggregated is None or found.split.split < found.split.aggregated
    assert sum(route.weight for route in found.routes) == pytest.approx(1.0)
    assert found.predicted is not None
    assert found.predicted.ttft_p50.value < found.predicted.ttft_p99.value <= 3.0
    assert found.predicted.tpot_p99.value <= 0.05
    assert found.valid_while is not None
    assert found.valid_while.rate_at_most >= 6.0 * (1 - 1e-5)
    assert {rate.kind for engine in found.engines for rate in engine.rates} == {"calibrated", "datasheet"}
    assert all(rate.source and rate.error > 0 for engine in found.engines for rate in engine.rates)


def test_without_a_link_nothing_is_split(tmp_path: Path) -> None:
    found = solved(tmp_path, NO_LINK)
    assert {engine.role for engine in found.engines} == {"both"}
    assert found.split is None
    assert "no link is stated" in {refused.why for refused in found.refused}


def test_a_slow_link_is_not_used(tmp_path: Path) -> None:
    """One gigabyte a second for half a gigabyte a request, six times a second."""
    found = solved(tmp_path, FLEET.replace("gb_per_s = 50", "gb_per_s = 1").replace('per = "chip"', 'per = "link"'))
    carried = sum(route.rate for route in found.routes if route.prefill != route.decode)
    assert carried * 2000 * 262144 <= 0.7e9 * (1 + 1e-6)


def test_unlike_caches_are_not_paired(tmp_path: Path) -> None:
    found = solved(tmp_path, FLEET.replace("price = 1.2", 'price = 1.2\nkv_dtype = "float8_e4m3fn"'))
    why = {(refused.prefill, refused.decode): refused.why for refused in found.refused}
    assert "dtype" in why["hopper", "h20"]


def test_unlike_caches_with_consent(tmp_path: Path) -> None:
    consent = 'casts = ["*->float8_e4m3fn"]'
    text = FLEET.replace("price = 1.2", f'price = 1.2\nkv_dtype = "float8_e4m3fn"\n{consent}')
    found = solved(tmp_path, text.replace("price = 3.0", f"price = 3.0\n{consent}"))
    assert ("hopper", "h20") not in {(refused.prefill, refused.decode) for refused in found.refused}


def test_unlike_layouts_are_paired(tmp_path: Path) -> None:
    """Converting them is what deeplink is for."""
    found = solved(tmp_path, FLEET.replace("price = 1.2", 'price = 1.2\nlayout = "vllm-ascend-910"'))
    assert any(route.prefill != route.decode for route in found.routes)


def test_a_layout_that_is_none(tmp_path: Path) -> None:
    found = solved(tmp_path, FLEET.replace("price = 1.2", 'price = 1.2\nlayout = "colour"'))
    assert all(route.prefill == route.decode for route in found.routes)


def test_too_much_says_what_would_do(tmp_path: Path) -> None:
    found = solved(tmp_path, FLEET.replace("rate = 6", "rate = 600"))
    assert found.status == "infeasible"
    what = {one.what for one in found.relaxations}
    assert {"rate", "inventory"} <= what
    assert not found.engines


def test_the_same_bytes(tmp_path: Path) -> None:
    once, again = (doc.encode(solved(tmp_path)) for _ in range(2))
    assert once == again
    assert doc.encode(doc.decode(once)) == once


def test_the_document_keeps_its_schema(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(msgspec.json.decode(doc.encode(solved(tmp_path))), doc.schema())


@pytest.mark.parametrize("data", [b"", b"[]", b'{"version": 2}', b'{"version": 1}', b'{"version": 1, "colour": 2}'])
def test_what_is_no_document(data: bytes) -> None:
    with pytest.raises(SolverError):
        doc.decode(data)


def test_the_command(tmp_path: Path) -> None:
    path, out = write(tmp_path), tmp_path / "out" / "placement.json"
    run = CliRunner()
    printed = run.invoke(
        main, ["solve", str(path), "--json", "--out", str(out), "--emit", "local", "--folder", str(tmp_path / "start")]
    )
    assert printed.exit_code == 0, printed.output
    assert printed.output.encode() == out.read_bytes()
    assert (tmp_path / "start" / "engines.sh").exists()
    shown = run.invoke(main, ["solve", str(path)])
    assert shown.exit_code == 0
    assert "optimal" in shown.output
    schema = run.invoke(main, ["solve", "--schema"])
    assert schema.output.encode() == (json.dumps(doc.schema(), indent=2) + "\n").encode()


def test_the_command_where_there_is_none(tmp_path: Path) -> None:
    run = CliRunner()
    none = run.invoke(main, ["solve", str(write(tmp_path, FLEET.replace("rate = 6", "rate = 600")))])
    assert none.exit_code == 1
    assert "what would be enough" in none.output
    wrong = run.invoke(main, ["solve", str(write(tmp_path, FLEET.replace("rate = 6", "rate = -6")))])
    assert wrong.exit_code == 2
    assert "fleet.toml:9" in wrong.output


def test_simulate(tmp_path: Path) -> None:
    run = CliRunner()
    found = run.invoke(main, ["simulate", str(write(tmp_path)), "--requests", "3000", "--json"])
    assert found.exit_code == 0, found.output
    value = msgspec.json.decode(found.output)
    assert value["requests"] == 3000
    assert value["attained"] >= 0.99
    late = run.invoke(main, ["simulate", str(tmp_path / "fleet.toml"), "--requests", "3000", "--rate", "3"])
    assert late.exit_code == 1


def test_verified(tmp_path: Path) -> None:
    found = solved(tmp_path, FLEET + "[solve]\nverify = true\n")
    assert found.simulated is not None
    assert found.simulated.attained >= 0.99
    assert found.predicted is not None
    assert found.predicted.ttft_p50.low <= found.simulated.ttft_p50 <= found.predicted.ttft_p50.high


def test_what_hangs_on_a_guess(tmp_path: Path) -> None:
    """With eight H20 more than enough for decode, slower ones cost more, but there is a placement; with two there is
    none, and nothing else can decode."""
    enough = solved(tmp_path)
    assert enough.status == "optimal"
    (h20,) = [one for one in enough.sensitivity if one.pool == "h20"]
    assert h20.error == 0.9
    assert h20.faster is not None
    assert h20.slower is not None
    assert h20.faster <= enough.value <= h20.slower
    tight = FLEET.replace("rate = 6", "rate = 14").replace(
        "count = 8\nprice = 3.0", 'count = 8\nroles = ["prefill"]\nprice = 3.0'
    )
    tight = tight.replace("count = 8\nprice = 1.2", 'count = 4\nroles = ["decode"]\nprice = 1.2')
    found = solved(tmp_path, tight)
    assert found.status == "model_too_uncertain", found.sensitivity
    assert any(one.slower is None and one.changes and one.sustains < 1 for one in found.sensitivity)


def test_a_front(tmp_path: Path) -> None:
    run = CliRunner()
    path = str(write(tmp_path))
    printed = run.invoke(main, ["solve", path, "--pareto", "3", "--json"])
    assert printed.exit_code == 0, printed.output
    points = msgspec.json.decode(printed.output)
    assert len(points) == 3
    assert [point["cost"] for point in points] == sorted(point["cost"] for point in points)
    assert "for a million" in run.invoke(main, ["solve", path, "--pareto", "2"]).output


def contract(folder: Path, name: str, weights: str) -> None:
    group = contracts.CacheGroup("full", tuple(range(64)), 8, 128, "bfloat16", 16, "block token head (kv dim)")
    rank = contracts.Rank(0, 0, 0, ((0, 8),), (0, 64), "127.0.0.1:1", {"tcp": "127.0.0.1:1"})
    identity = contracts.Model("Qwen3ForCausalLM", 64, 151936, "{}", "", weights)
    value = contracts.Contract("vllm", "0.32", name, "prefill", name, identity, (group,), (rank,))
    (folder / f"{name}.json").write_bytes(contracts.to_json(value))


@pytest.mark.parametrize(("weights", "agreed"), [("same", True), ("other", False)])
def test_contracts_decide_where_there_are_any(tmp_path: Path, weights: str, agreed: bool) -> None:
    contract(tmp_path, "a", "same")
    contract(tmp_path, "b", weights)
    text = FLEET.replace("price = 3.0", 'price = 3.0\ncontract = "a.json"')
    found = solved(tmp_path, text.replace("price = 1.2", 'price = 1.2\ncontract = "b.json"'))
    why = {(refused.prefill, refused.decode): refused.why for refused in found.refused}
    if agreed:
        assert ("hopper", "h20") not in why
    else:
        assert "model.weights" in why["hopper", "h20"]
    assert any(route.prefill != route.decode for route in found.routes) == agreed


def test_the_published_schema() -> None:
    """Written by: deeplink solve --schema > docs/placement.schema.json"""
    published = Path(__file__).parents[2] / "docs" / "placement.schema.json"
    assert published.read_text() == json.dumps(doc.schema(), indent=2) + "\n"


@pytest.mark.parametrize("objective", ["throughput", "capacity", "energy", "latency"])
def test_other_objectives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objective: str) -> None:
    monkeypatch.setattr(fleetfile, "_MADE", 4000)
    text = FLEET.replace('objective = "cost"', f'objective = "{objective}"') + "[solve]\nverify = true\n"
    found = solved(tmp_path, text)
    assert found.status in ("optimal", "feasible", "model_too_uncertain")
    assert found.simulated is not None
    assert found.simulated.attained >= 0.99
    if objective in ("throughput", "capacity"):
        assert found.value > 1
        assert 0.5 * found.value <= found.simulated.multiple <= 2 * found.value
        assert found.engines


@pytest.mark.parametrize("objective", ["throughput", "capacity", "latency", "energy"])
def test_nothing_in_time_is_no_placement(tmp_path: Path, objective: str) -> None:
    text = FLEET.replace("ttft = 3.0", "ttft = 0.001").replace('objective = "cost"', f'objective = "{objective}"')
    found = solved(tmp_path, text)
    assert found.status == "infeasible"
    assert not found.engines
    assert "ttft" in {one.what for one in found.relaxations}


def test_too_short_a_time_says_what_would_do(tmp_path: Path) -> None:
    found = solved(tmp_path, FLEET.replace("tpot = 0.05", "tpot = 0.006"))
    assert found.status == "infeasible"
    assert "tpot" in {one.what for one in found.relaxations}


def test_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    path = str(write(tmp_path))
    printed = []
    for seed in ("1", "2"):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONSAFEPATH": "1",
            "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        }
        done = subprocess.run(
            [sys.executable, "-m", "deeplink.cli", "solve", path, "--json"],
            env=environment,
            capture_output=True,
            timeout=50,
            check=True,
        )
        printed.append(done.stdout)
    assert printed[0] == printed[1]
    assert doc.decode(printed[0]).engines


TWINS = FLEET[: FLEET.index("[[pools]]")]
TWIN = '[[pools]]\nname = "{}"\nchip = "NVIDIA H100 SXM"\ncount = 8\nprice = 3.0\ntp = [2]\nroles = ["both"]\n'


@pytest.mark.parametrize("where", ["left", "right"])
def test_what_runs_stays(tmp_path: Path, where: str) -> None:
    """Two pools that are alike: nothing is to be gained by moving."""
    text = TWINS
    for name in ("left", "right"):
        text += TWIN.format(name)
        if name == where:
            text += 'current = [{ role = "both", tp = 2, engines = 1 }]\n'
    found = solved(tmp_path, text)
    assert {engine.pool for engine in found.engines} == {where}
