"""LMDeploy's server on a CPU whose layers are spread over two processes, of Ray's or of LMDeploy's own.

Those of Ray's know deeplink by a file in an environment, which is one that is thrown away.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small import REFUSED_SECONDS, START_SECONDS, answers_are_right, server, some_leave

from deeplink.errors import LocalError
from deeplink.local.environment import Environment
from deeplink.local.process import Process

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]
TWO = ("--tp", "2", "--distributed-executor-backend")
ROUNDS = 30
"""Of four requests. LMDeploy's own workers meet after every 32 calls, which is about once in each."""


@pytest.mark.usefixtures("workers_know")
@pytest.mark.parametrize(("backend", "workers"), [("ray", b"RayWorkerWrapper"), ("mp", b"--multiprocessing-fork")])
def test_two_workers_and_several_requests_at_once(
    with_ray: Path,
    lmdeploy: Environment,
    small_model: Path,
    in_lmdeploy: Any,
    tmp_path: Path,
    backend: str,
    workers: bytes,
) -> None:
    python = with_ray if backend == "ray" else lmdeploy.python
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


def test_workers_that_nothing_has_told_of_deeplink_are_refused(
    with_ray: Path, small_model: Path, tmp_path: Path
) -> None:
    with server(with_ray, small_model, tmp_path, *TWO, "ray") as process, pytest.raises(LocalError):
        process.wait_ready(REFUSED_SECONDS)
    assert "nothing brings deeplink into them" in process.log.read_text()
