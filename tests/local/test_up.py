"""`deeplink up` without engines: what it refuses, what its check finds. With engines: tests/engines/test_emitted."""

from __future__ import annotations

import json
import signal
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
from deeplink.local import up
from deeplink.plugins import load_plugins
from deeplink.solver import placement as doc
from deeplink.solver.emit.members import members
from deeplink.solver.fleets import fleetfile
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
        up._installed("vllm", found)
    assert "vllm-ascend" in caught.value.remedy


def test_what_is_no_placement(tmp_path: Path) -> None:
    (tmp_path / "placement.json").write_text("{}")
    result = CliRunner().invoke(main, ["up", str(tmp_path / "placement.json")])
    assert result.exit_code == 1
    assert "not a placement" in result.stderr
    assert CliRunner().invoke(main, ["up", "x", "--json"]).exit_code == 2


def test_prompts_of_tokens_that_every_vocabulary_has() -> None:
    for seed in range(5):
        ids = up.token_ids(50, seed)
        assert len(ids) == 50
        assert 100 <= min(ids) <= max(ids) < 1100
    assert len({up.token_ids(5, seed)[0] for seed in range(5)}) == 5
