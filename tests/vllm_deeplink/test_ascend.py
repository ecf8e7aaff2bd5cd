"""vllm-ascend, as its wheels are: recorded by tools/ascend.py, so that nothing of it has to be installed."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import made_vendor
import pytest

from deeplink.chips.catalogue import ascend
from vllm_deeplink import platform, vendors

ROOT = Path(__file__).parents[2]
RECORDED = sorted(Path(__file__).with_name("data").glob("vllm-ascend-*.json"))
VERSIONS = [path.stem.removeprefix("vllm-ascend-") for path in RECORDED]
ELSEWHERE = {"0.23.0": ["triton-ascend==3.2.0"]}
"""Pins of releases that only the vendor's own package index has, and what PyPI has instead."""


@pytest.fixture(params=RECORDED, ids=VERSIONS)
def recorded(request: pytest.FixtureRequest) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(request.param.read_text())
    return made


def test_there_are_records() -> None:
    assert VERSIONS == ["0.18.0", "0.23.0"]


def test_the_hook_that_is_decorated(recorded: dict[str, Any]) -> None:
    """A class with the recorded signature, made and decorated."""
    signature = recorded["methods"]["check_and_update_config"]
    parameters = signature.removeprefix("@classmethod ").partition(" -> ")[0]
    assert signature.startswith("@classmethod (cls, vllm_config")
    source = (
        f"class NPUPlatform:\n    @classmethod\n    def check_and_update_config{parameters}: cls.seen = vllm_config"
    )
    scope: dict[str, Any] = {"VllmConfig": object}
    exec(compile(ast.parse(source), "recorded", "exec"), scope)
    made = scope["NPUPlatform"]

    class Config:
        kv_transfer_config = None

    platform.decorate(made)
    config = Config()
    made.check_and_update_config(config)
    assert made.seen is config


def test_its_plugin_is_found_by_what_is_known_of_the_chip(recorded: dict[str, Any], site: Path) -> None:
    """A stand-in with the recorded names, for each Ascend that vLLM runs on."""
    ((name, value),) = recorded["entry_points"]["vllm.platform_plugins"].items()
    module, _, function = value.partition(":")
    assert (name, function) == ("ascend", "register")
    package, _, offered = recorded["platform"].rpartition(".")
    assert package == f"{module}.platform"
    body = f"class {offered}:\n    pass\n"
    made_vendor.install(site, name, f'return "{recorded["platform"]}"', platform=body, module=module)
    serving = vendors.check(vendors.look())
    assert serving is not None
    plugins = {served.plugin for profile in ascend.PROFILES for served in profile.served if served.engine == "vLLM"}
    assert plugins == {serving.distribution} == {"vllm-ascend"}


def _tool(*words: str) -> Any:
    command = [sys.executable, str(ROOT / "tools" / "ascend.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_record_is_the_wheels(version: str) -> None:
    (path,) = (one for one in RECORDED if one.stem.endswith(version))
    assert _tool("describe", version) == json.loads(path.read_text())


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_extra_resolves_beside_its_pins(version: str) -> None:
    """As `pip install 'deeplink[ascend]' vllm-ascend==VERSION` would, on aarch64: its torch and torch-npu stay."""
    found = _tool("resolve", version, *ELSEWHERE.get(version, ()))
    (path,) = (one for one in RECORDED if one.stem.endswith(version))
    pins = dict(need.split("==") for need in json.loads(path.read_text())["requires"] if need.startswith("torch"))
    assert {name: found[name] for name in ("torch", "torch-npu")} == {
        name: pins[name] for name in ("torch", "torch-npu")
    }
    assert found["vllm-ascend"] == version
    assert "pluggy" in found
