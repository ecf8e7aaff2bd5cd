"""LMDeploy's server on a CPU whose layers are spread over two processes of Ray's.

Those know deeplink by a file in an environment, which is one that is thrown away.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from programs import say
from small import REFUSED_SECONDS, START_SECONDS, answers_are_right, environ, python_with, server

from deeplink.errors import LocalError
from deeplink.local import environment
from deeplink.local.environment import Environment, Lock
from deeplink.local.process import Process

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]
RAY = Lock(
    name="ray-2.60.0",
    file=Path(__file__).with_name("ray-2.60.0.lock"),
    pythons=environment.LMDEPLOY_CPU.pythons,
    imports=(),  # the rest of what it needs is LMDeploy's
)
BY_RAY = ("--tp", "2", "--distributed-executor-backend", "ray", "--max-batch-size", "1")


@pytest.fixture(scope="module")
def python(lmdeploy: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return python_with(tmp_path_factory.mktemp("with-ray"), lmdeploy, environment.ensure(RAY, say))


@pytest.fixture
def enabled(python: Path) -> Iterator[None]:
    command(python, "enable")
    yield
    command(python, "disable")


def command(python: Path, word: str) -> None:
    words = [python, "-m", "deeplink.cli", "serve", "workers", word]
    subprocess.run(words, check=True, timeout=60, env=environ())


@pytest.mark.usefixtures("enabled")
def test_two_workers_of_rays(python: Path, small_model: Path, in_lmdeploy: Any, tmp_path: Path) -> None:
    with server(python, small_model, tmp_path, *BY_RAY) as process:
        process.wait_ready(START_SECONDS)
        answers_are_right(process, small_model, in_lmdeploy, at_once=1)
        assert working(process) == 2


def working(process: Process) -> int:
    return sum(b"RayWorkerWrapper" in Path(f"/proc/{one}/cmdline").read_bytes() for one in process.descendants())


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--distributed-executor-backend", "mp"), "own worker processes answer only some"),
        (("--distributed-executor-backend", "ray", "--max-batch-size", "4"), "one request at a time"),
    ],
)
def test_what_loses_answers_or_was_not_tested_is_refused(
    python: Path, small_model: Path, tmp_path: Path, words: tuple[str, ...], why: str
) -> None:
    with server(python, small_model, tmp_path, "--tp", "2", *words) as process, pytest.raises(LocalError):
        process.wait_ready(REFUSED_SECONDS)
    assert why in process.log.read_text()


def test_workers_that_nothing_has_told_of_deeplink_are_refused(python: Path, small_model: Path, tmp_path: Path) -> None:
    with server(python, small_model, tmp_path, *BY_RAY) as process, pytest.raises(LocalError):
        process.wait_ready(REFUSED_SECONDS)
    assert "nothing brings deeplink into them" in process.log.read_text()
