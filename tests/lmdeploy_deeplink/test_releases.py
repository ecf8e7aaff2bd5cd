"""Releases of LMDeploy before the one that deeplink's own environments have, on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from programs import say
from small import REFUSED_SECONDS, START_SECONDS, answers_are_right, python_with, server

from deeplink.errors import LocalError
from deeplink.local import environment
from deeplink.local.environment import Environment, Lock
from lmdeploy_deeplink.engine import versions

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]
OLDER = sorted(set(versions.TESTED) - {max(versions.TESTED)})


@pytest.fixture(scope="module", params=OLDER)
def python(request: pytest.FixtureRequest, lmdeploy: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment that is thrown away: what the newest release needs does for the older ones."""
    lock = Lock(
        name=f"lmdeploy-{request.param}",
        file=Path(__file__).with_name(f"lmdeploy-{request.param}.lock"),
        pythons=environment.LMDEPLOY_CPU.pythons,
        imports=(),  # the rest of what it needs is in the other environment
    )
    return python_with(tmp_path_factory.mktemp(lock.name), environment.ensure(lock, say), lmdeploy)


def test_its_engine_answers(python: Path, small_model: Path, in_lmdeploy: Any, tmp_path: Path) -> None:
    with server(python, small_model, tmp_path) as process:
        process.wait_ready(START_SECONDS)
        answers_are_right(process, small_model, in_lmdeploy)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--role", "Prefill", "--migration-backend", "deeplink"), "argument --migration-backend: invalid choice"),
        (("--tp", "2"), "more than one process was not tested with this release"),
    ],
)
def test_what_it_is_not_tested_for_is_refused(
    python: Path, small_model: Path, tmp_path: Path, words: tuple[str, ...], why: str
) -> None:
    with server(python, small_model, tmp_path, *words) as process, pytest.raises(LocalError):
        process.wait_ready(REFUSED_SECONDS)
    assert why in process.log.read_text()
