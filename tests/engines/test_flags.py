"""The ways to ask for deeplink, in the engine's own Python, without starting an engine."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fleet import Fleet

PROGRAM = """
import json, os, sys
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser

load_general_plugins()

def engine_config(given):
    if isinstance(given, list):
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        return EngineArgs.from_cli_args(parser.parse_args(given)).create_engine_config()
    return EngineArgs(**given).create_engine_config()

def mistake(given, variables):
    os.environ.update(variables)
    try:
        engine_config(given)
        return ""
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"
    finally:
        for name in variables:
            del os.environ[name]

given, mistakes = json.loads(sys.argv[1])
if mistakes:
    print(json.dumps([mistake(*one) for one in mistakes]))
    sys.exit()
whole = engine_config(given)
config = whole.kv_transfer_config
print(json.dumps(None if config is None else {
    "connector": config.kv_connector,
    "role": config.kv_role,
    "on_failure": config.kv_load_failure_policy,
    "additional": whole.additional_config,
    "platform": type(current_platform).__qualname__,
    "decorated": hasattr(current_platform, "_deeplink"),
    **config.kv_connector_extra_config,
}))
"""
MISTAKES: list[tuple[list[str] | dict[str, Any], dict[str, str], str]] = [
    (["--deeplink-role", "prefill"], {}, "without --platform deeplink"),
    ([], {"DEEPLINK_PLATFORM": "deeplink", "DEEPLINK_ROLE": "prefil"}, "'prefil' is not a role"),
    (["--deeplink-router", "router:8000", "--platform", "deeplink"], {}, "not a URL of scheme, host and port"),
    ({"additional_config": {"deeplink": {"router": "http://r"}}}, {}, "nothing is known of where this engine's API is"),
    ([], {"DEEPLINK_PLATFORM": "deeplink", "DEEPLINK_CONTROL_PORT": "http"}, "DEEPLINK_CONTROL_PORT is not a port"),
    (["--platform", "deeplink", "--deeplink-config", "/nowhere.toml"], {}, "cannot read /nowhere.toml"),
    (
        ["--platform", "deeplink", "--pipeline-parallel-size", "2", "--enforce-eager"],
        {},
        "vLLM's own pipeline ends at the first request",
    ),
    (["--platform", "deeplink", "--data-parallel-size", "2", "--data-parallel-size-local", "1"], {}, "on one host"),
    (["--additional-config", '{"deeplink": {"rol": 1}}'], {}, "there is no such setting"),
    (
        ["--platform", "deeplink", "--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'],
        {},
        "not known to work beside NixlConnector",
    ),
]


def ask(fleet: Fleet, given: list[str] | dict[str, Any], site: Path | None = None, **variables: str) -> Any:
    """What comes of `given`, command line or arguments; the error output if nothing does. `site` has more packages."""
    return _run(fleet, given, (), site, variables)


def _run(fleet: Fleet, given: Any, mistakes: Sequence[Any], site: Path | None, variables: dict[str, str]) -> Any:
    path = f"{fleet.overlay}:{site}" if site else str(fleet.overlay)
    env = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    command = [fleet.environment.folder / "bin" / "python", "-c", PROGRAM, json.dumps([given, mistakes])]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env={**env, **variables}, cwd=fleet.folder
    )
    if done.returncode:
        return done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def settings(fleet: Fleet) -> Path:
    file = fleet.folder / "recompute.toml"
    file.write_text('[kv]\non_failure = "recompute"\n')
    return file


def test_flags(fleet: Fleet, settings: Path) -> None:
    words = ["--model", str(fleet.model), "--platform", "deeplink", "--deeplink-role", "prefill"]
    assert ask(fleet, [*words, "--deeplink-config", str(settings)]) == {
        "connector": "DeepLinkConnector",
        "role": "kv_producer",
        "on_failure": "recompute",
        "config": str(settings),
        "control_port": 9000,
        "registration": None,
        "replicas": 1,
        "additional": {},
        "platform": "CpuPlatform",
        "decorated": True,
    }


def test_a_file_of_vllms(fleet: Fleet, settings: Path) -> None:
    """``vllm serve --config FILE``, and a router to register with."""
    file = fleet.folder / "serve.yaml"
    lines = [f"model: {fleet.model}", "platform: deeplink", "deeplink-role: decode", f"deeplink-config: {settings}"]
    file.write_text("\n".join([*lines, "deeplink-router: http://127.0.0.1:9999/", "deeplink-control-port: 7000"]))
    found = ask(fleet, ["--config", str(file)])
    assert (found["role"], found["control_port"], found["on_failure"]) == ("kv_consumer", 7000, "recompute")
    where = {"router": "http://127.0.0.1:9999", "url": "http://127.0.0.1:8000", "name": "127.0.0.1:8000"}
    where["api"] = where["url"]
    assert found["registration"] == where


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_of_an_engine_on_several_hosts_the_first_registers(fleet: Fleet, rank: int) -> None:
    words = ["--model", str(fleet.tiny("four-heads")), "--tensor-parallel-size", "2", "--nnodes", "2"]
    words += ["--node-rank", str(rank), "--platform", "deeplink", "--deeplink-router", "http://127.0.0.1:9999"]
    found = ask(fleet, words)
    assert (found["registration"] is None) == (rank > 0), found


def test_a_table(fleet: Fleet, settings: Path) -> None:
    """What ``LLM(...)`` passes on. The platform's own plugin does not see it."""
    table = {"role": "prefill", "config": str(settings), "control-port": 7001}
    found = ask(fleet, {"model": str(fleet.model), "additional_config": {"deeplink": table, "other": 1}})
    assert (found["role"], found["control_port"], found["on_failure"]) == ("kv_producer", 7001, "recompute")
    assert found["additional"] == {"other": 1}
    assert found["decorated"]


def test_environment(fleet: Fleet, settings: Path) -> None:
    """``LLM(...)`` makes its arguments without a command line."""
    variables = {
        "DEEPLINK_PLATFORM": "deeplink",
        "DEEPLINK_ROLE": "decode",
        "DEEPLINK_CONTROL_PORT": "19000",
        "DEEPLINK_CONFIG": str(settings),
    }
    found = ask(fleet, {"model": str(fleet.model)}, **variables)
    assert (found["role"], found["control_port"], found["on_failure"]) == ("kv_consumer", 19000, "recompute")
    over = ask(fleet, ["--model", str(fleet.model), "--deeplink-role", "both"], **variables)
    assert (over["role"], over["control_port"]) == ("kv_both", 19000)


def test_without_it_nothing_changes(fleet: Fleet) -> None:
    assert ask(fleet, {"model": str(fleet.model)}) is None


def test_mistakes_are_told_at_once(fleet: Fleet) -> None:
    model = str(fleet.model)
    cases = [
        (["--model", model, *given] if isinstance(given, list) else {"model": model, **given}, variables)
        for given, variables, _ in MISTAKES
    ]
    told = _run(fleet, None, cases, None, {})
    assert isinstance(told, list), told
    for (_, _, text), error in zip(MISTAKES, told, strict=True):
        assert error.startswith("ConfigError: ")
        assert text in error
