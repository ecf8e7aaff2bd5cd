"""`deeplink up` without engines: what it refuses, what its check finds. With engines: tests/engines/test_emitted."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from described import write
from fake_openai import Script, serving

from deeplink.cli import main
from deeplink.errors import LocalError
from deeplink.local import placed, trial, up
from deeplink.local.environment import Environment
from deeplink.local.process import Process
from deeplink.plugins import load_plugins
from deeplink.solver import placement as doc
from deeplink.solver.emit.members import Member, members
from deeplink.solver.fleets import fleetfile
from deeplink.solver.kinds import KINDS, Kind
from deeplink.solver.place import place
from deeplink.solver.placement import Placement


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def placement(tmp_path_factory: pytest.TempPathFactory) -> Placement:
    return place(fleetfile.load(write(tmp_path_factory.mktemp("fleet"))))


def headers(placement: Placement, path: str = "handoff") -> dict[str, str]:
    named = {engine.role: engine.name for engine in placement.engines}
    return {
        "x-deeplink-path": path,
        "x-deeplink-prefill": named["prefill"],
        "x-deeplink-decode": named["decode"],
    }


def once(monkeypatch: pytest.MonkeyPatch, placement: Placement, script: Script, folder: Path) -> Result:
    """`deeplink up --once --json` with a router that answers as the script says."""
    file = folder / "placement.toml"
    file.write_bytes(doc.encode_toml(placement))

    @contextmanager
    def running(given: Placement, *_: Any) -> Iterator[up.Running]:
        with serving(script) as url:
            yield up.Running(given, members(given, load_plugins().chips.items), {"e": url}, url, file, ())

    monkeypatch.setattr(up, "running", running)
    return CliRunner().invoke(main, ["up", str(file), "--once", "--json", "--most", "64"])


def test_all_as_planned(monkeypatch: pytest.MonkeyPatch, placement: Placement, tmp_path: Path) -> None:
    script = Script(headers=headers(placement))
    result = once(monkeypatch, placement, script, tmp_path)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    assert [one["bucket"] for one in report["requests"]] == [bucket.name for bucket in placement.buckets]
    assert {len(request["prompt"]) for request in script.requests} == {64}
    assert {request["model"] for request in script.requests} == {placement.model}


@pytest.mark.parametrize("wrong", ["path", "engine", "status", "cut"])
def test_what_is_not_as_planned_is_told(
    monkeypatch: pytest.MonkeyPatch, placement: Placement, tmp_path: Path, wrong: str
) -> None:
    script = Script(headers=headers(placement, "plain" if wrong == "path" else "handoff"))
    if wrong == "engine":
        script.headers["x-deeplink-decode"] = "another"
    script.status = 503 if wrong == "status" else 200
    script.cut = wrong == "cut"
    result = once(monkeypatch, placement, script, tmp_path)
    assert result.exit_code == 1
    assert "not as planned" in result.stderr
    assert placement.buckets[0].name in result.stderr


def test_a_placement_without_engines(placement: Placement) -> None:
    empty = msgspec.structs.replace(placement, engines=())
    with pytest.raises(LocalError, match="nothing to start"), up.running(empty, up.Options(), print):
        pass


def test_a_chip_whose_engine_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, placement: Placement, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (found,) = members(
        msgspec.structs.replace(
            placement, engines=(msgspec.structs.replace(placement.engines[0], chip="Ascend 910B", count=1),)
        ),
        load_plugins().chips.items,
    )
    with pytest.raises(LocalError, match="no vllm is installed here") as caught:
        placed._installed("vllm", found)
    assert "vllm-ascend" in caught.value.remedy


def of_kind(placement: Placement, kind: Kind, chip: str) -> Member:
    engine = msgspec.structs.replace(
        placement.engines[0], chip=chip, count=1, tp=1, role="prefill", engine=kind, kv_dtype="bfloat16"
    )
    (found,) = members(msgspec.structs.replace(placement, engines=(engine,)), load_plugins().chips.items)
    return found


def process_of(placement: Placement, member: Member, folder: Path) -> Process:
    kept: dict[Kind, Environment] = {kind: Environment(folder / kind) for kind in KINDS}
    machine = placed.Machine("127.0.0.1", kept if member.processor else {}, folder / "packages", folder)
    return placed.process(placement, member, machine, 8123, folder / "own.toml")


@pytest.mark.parametrize("kind", ["sglang", "lmdeploy"])
def test_engines_that_are_modules_run_by_the_python_that_has_them(
    monkeypatch: pytest.MonkeyPatch, placement: Placement, tmp_path: Path, kind: Kind
) -> None:
    found = of_kind(placement, kind, "NVIDIA H20")
    variable = f"{kind.upper()}_PYTHON"
    monkeypatch.delenv(variable, raising=False)
    monkeypatch.delitem(sys.modules, kind, raising=False)  # other tests have stand-ins for engines
    with pytest.raises(LocalError, match=f"no {found.title} is installed here") as caught:
        process_of(placement, found, tmp_path)
    assert variable in caught.value.remedy
    monkeypatch.setenv(variable, "/opt/theirs/bin/python")
    made = process_of(placement, found, tmp_path)
    assert made.argv[:2] == ["/opt/theirs/bin/python", "-m"]
    assert made.env["DEEPLINK_CONFIG"] == str(tmp_path / "own.toml")


@pytest.mark.parametrize("kind", KINDS)
def test_engines_on_processors_run_in_environments_of_their_kind(
    placement: Placement, tmp_path: Path, kind: Kind
) -> None:
    made = process_of(placement, of_kind(placement, kind, "CPU, x86"), tmp_path)
    assert made.argv[0] == str(tmp_path / kind / "bin" / ("vllm" if kind == "vllm" else "python3"))
    assert str(tmp_path / "packages") in made.env["PYTHONPATH"].split(":")
    assert made.url == "http://127.0.0.1:8123"
    assert "8123" in made.argv


def test_lmdeploy_reads_a_model_that_newer_transformers_have_written(placement: Placement, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}))
    here = msgspec.structs.replace(placement, checkpoint=str(model))
    made = process_of(here, of_kind(here, "lmdeploy", "CPU, x86"), tmp_path)
    folder = Path(made.argv[made.argv.index("lmdeploy") + 1])
    assert folder != model
    assert json.loads((folder / "config.json").read_text())["rope_theta"] == 1e4


def test_prompts_are_texts_where_an_engine_takes_no_token_ids(placement: Placement) -> None:
    script = Script()
    with serving(script) as url:
        for kind, taken in (("sglang", list), ("lmdeploy", str)):
            member = of_kind(placement, kind, "CPU, x86")  # type: ignore[arg-type]
            trial.check(url, placement, (member,), 64)
            assert isinstance(script.requests[-1]["prompt"], taken)
    assert len(script.requests[-1]["prompt"].split()) == 64
    begins = {trial.text(9, seed) for seed in range(16)}
    assert len(begins) == 16


def test_tokens_are_counted_where_their_ids_are_not_told(placement: Placement) -> None:
    found = of_kind(placement, "lmdeploy", "CPU, x86")
    script = Script(says_ids=False, usage=True)
    with serving(script) as url:
        (checked, *_) = trial.check(url, placement, (found,), 64)
    assert checked.tokens == 8


def test_what_is_no_placement(tmp_path: Path) -> None:
    (tmp_path / "placement.json").write_text("{}")
    result = CliRunner().invoke(main, ["up", str(tmp_path / "placement.json")])
    assert result.exit_code == 1
    assert "not a placement" in result.stderr
    assert CliRunner().invoke(main, ["up", "x", "--json"]).exit_code == 2


def test_prompts_of_tokens_that_every_vocabulary_has() -> None:
    for seed in range(5):
        ids = trial.token_ids(50, seed)
        assert len(ids) == 50
        assert 100 <= min(ids) <= max(ids) < 1100
    assert len({trial.token_ids(5, seed)[0] for seed in range(5)}) == 5
