"""The file by which processes that deeplink does not start learn of it, in an environment that is thrown away."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import say

from deeplink.local import overlay
from lmdeploy_deeplink.engine import waiting, workers

Run = Callable[..., "subprocess.CompletedProcess[str]"]
SEEN = (
    "import sys; names = [name for name in sys.modules if 'deeplink' in name];"
    "print(*names, *[type(one).__name__ for one in sys.meta_path])"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment, with an LMDeploy in it that nothing was tested with."""
    made = tmp_path_factory.mktemp("environment")
    venv.create(made, symlinks=True)
    packages = next(made.glob("lib/python*/site-packages"))
    (packages / "lmdeploy").mkdir()
    (packages / "lmdeploy" / "__init__.py").write_text("print('imported')\n")
    (packages / "lmdeploy-0.1.0.dist-info").mkdir()
    (packages / "lmdeploy-0.1.0.dist-info" / "METADATA").write_text("Name: lmdeploy\nVersion: 0.1.0\n")
    return made


@pytest.fixture
def run(folder: Path) -> Run:
    # Its own packages come before those of the Python that runs this.
    found = f"{overlay.ensure(say)}:{sysconfig.get_path('purelib')}"

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONPATH": found, **variables}
        return subprocess.run(
            [folder / "bin" / "python", *words], env=env, capture_output=True, text=True, timeout=60, check=False
        )

    return run


@pytest.fixture
def place(folder: Path) -> Path:
    return next(folder.glob("lib/python*/site-packages")) / workers.FILE


def command(run: Run, word: str) -> subprocess.CompletedProcess[str]:
    return run("-m", "deeplink.cli", "serve", "workers", word)


def test_it_is_written_and_removed_and_either_can_be_asked_for_twice(run: Run, place: Path) -> None:
    for _ in range(2):
        done = command(run, "enable")
        assert done.returncode == 0, done.stderr
        assert place.read_text() == workers.LINE
    for _ in range(2):
        done = command(run, "disable")
        assert done.returncode == 0, done.stderr
        assert not place.exists()
    assert not list(place.parent.glob(f".{workers.FILE}*"))


@pytest.mark.parametrize("word", ["enable", "disable"])
def test_a_file_that_is_not_deeplinks_is_left_alone(run: Run, place: Path, word: str) -> None:
    place.write_text(f"{workers.LINE}import this\n")
    try:
        done = command(run, word)
        assert done.returncode == 1
        assert "is not what this release of deeplink writes" in done.stderr
        assert place.read_text() == f"{workers.LINE}import this\n"
    finally:
        place.unlink()


def test_without_the_variable_nothing_happens(run: Run, place: Path) -> None:
    place.write_text(workers.LINE)
    try:
        without = run("-c", SEEN)
        place.unlink()
        assert (without.stdout, without.stderr) == (run("-c", SEEN).stdout, "")
        assert "deeplink" not in without.stdout
    finally:
        place.unlink(missing_ok=True)


def test_with_the_variable_lmdeploy_is_met_when_it_is_imported_and_not_before(run: Run, place: Path) -> None:
    place.write_text(workers.LINE)
    try:
        before = run("-c", SEEN, **{waiting.VARIABLE: "cpu"})
        assert {waiting.__name__, "_Finder"} < set(before.stdout.split())
        assert before.stderr == ""
        met = run("-c", "import json; import lmdeploy", **{waiting.VARIABLE: "cpu"})
        assert "no release that deeplink was tested with" in met.stderr
        assert met.stdout == ""  # refused before any of it has run
    finally:
        place.unlink()


def test_what_this_python_has_is_what_is_asked_of() -> None:
    assert workers.place().parent == Path(sysconfig.get_path("purelib"))
    assert str(workers.place()).startswith(sys.prefix)
