"""Only a release of LMDeploy that was tested is changed in memory; the others are refused by name."""

from __future__ import annotations

import ast
import importlib.metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from deeplink.cli import main
from deeplink.errors import PluginError
from deeplink.local.environment import LMDEPLOY_CPU
from lmdeploy_deeplink.engine import v0_18, versions

ENGINE = Path(versions.__file__).parent


def installed(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(versions, "version", lambda _: version)


@pytest.mark.parametrize("version", ["0.15.0", "0.16.1", "0.18.1", "0.19.0", "0.18.0+local"])
def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    installed(monkeypatch, version)
    with pytest.raises(PluginError, match="no release that deeplink was tested with") as caught:
        versions.hooks()
    assert (caught.value.field, caught.value.ours, caught.value.theirs) == (
        "lmdeploy",
        "0.16.0, 0.17.0, 0.18.0",
        version,
    )


def test_no_lmdeploy_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: str) -> str:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(versions, "version", none)
    done = CliRunner().invoke(main, ["serve", "lmdeploy", "model", "--dtype", "bfloat16"])
    assert done.exit_code == 1
    assert "LMDeploy is not installed" in done.output


def test_what_is_tested_is_what_the_environment_has() -> None:
    assert f"lmdeploy=={max(versions.TESTED)}\n" in LMDEPLOY_CPU.file.read_text()
    for name in versions.TESTED.values():
        assert (ENGINE / f"{name.rpartition('.')[2]}.py").exists()


def test_only_modules_of_a_release_change_it() -> None:
    """Everything else only uses LMDeploy's names: no attribute of its modules is set elsewhere."""
    releases = tuple(name.rpartition(".")[2] for name in versions.TESTED.values())
    for path in sorted((*ENGINE.glob("*.py"), *ENGINE.with_name("migration").glob("*.py"))):
        if path.stem.endswith(releases) and not path.stem.startswith("ops_"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assign):
                changed = [target for target in node.targets if isinstance(target, ast.Attribute)]
                roots = {ast.unparse(target).split(".")[0] for target in changed}
                # `cpu` changes torch, and says so; a step's context is LMDeploy's to have filled in; `waiting` takes
                # itself out of the module that it has waited for.
                allowed = {"self", "step_context"} | {"cpu": {"torch", "cuda"}, "waiting": {"module", "spec"}}.get(
                    path.stem, set()
                )
                assert roots <= allowed, (path.name, ast.unparse(node))


@pytest.mark.parametrize("field", ["dp", "ep"])
def test_replicas_and_spread_experts_on_cpus_are_refused(field: str) -> None:
    v0_18._check_parts(SimpleNamespace(dp=1, ep=1, tp=2))
    with pytest.raises(PluginError, match="each has its part") as caught:
        v0_18._check_parts(SimpleNamespace(**{"dp": 1, "ep": 1, field: 2}))
    assert (caught.value.field, caught.value.theirs) == (field, "2")
