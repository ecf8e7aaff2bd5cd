"""LMDeploy's server on a CPU whose layers are spread over two processes, of Ray's or of LMDeploy's own.

Those of Ray's know deeplink by a file in an environment, which is one that is thrown away.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from programs import say
from small import REFUSED_SECONDS, START_SECONDS, answers_are_right, environ, python_with, server, some_leave

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
TWO = ("--tp", "2", "--distributed-executor-backend")
ROUNDS = 30
"""Of four requests. LMDeploy's own workers meet after every 32 calls, which is about once in each."""


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
@pytest.mark.parametrize(("backend", "workers"), [("ray", b"RayWorkerWrapper"), ("mp", b"--multiprocessing-fork")])
def test_two_workers_and_several_requests_at_once(
    python: Path, small_model: Path, in_lmdeploy: Any, tmp_path: Path, backend: str, workers: bytes
) -> None:
    with server(python, small_model, tmp_path, *TWO, backend) as process:
        process.wait_ready(START_SECONDS)
        answers_are_right(process, small_model, in_lmdeploy, rounds=ROUNDS)
        some_leave(process, 12, 4)
        answers_are_right(process, small_model, in_lmdeploy)
        # LMDeploy's server starts its engine as the engine starts its workers.
        assert working(process, workers) == (2 if backend == "ray" else 3)


def working(process: Process, words: bytes) -> int:
    found = (Path(f"/proc/{one}/cmdline").read_bytes() for one in process.descendants())
    return sum(words in one for one in found)


def test_workers_that_nothing_has_told_of_deeplink_are_refused(python: Path, small_model: Path, tmp_path: Path) -> None:
    with server(python, small_model, tmp_path, *TWO, "ray") as process, pytest.raises(LocalError):
        process.wait_ready(REFUSED_SECONDS)
    assert "nothing brings deeplink into them" in process.log.read_text()
