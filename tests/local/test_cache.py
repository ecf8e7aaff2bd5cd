"""Folders are made once, by one process at a time, and never half."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deeplink.errors import LocalError
from deeplink.local import cache

RACER = """
import sys, time
from pathlib import Path
from deeplink.local import cache
def make(folder):
    folder.mkdir()
    with open(sys.argv[2], "a") as file:
        file.write("made\\n")
    time.sleep(0.5)
cache.ensure(Path(sys.argv[1]), make, print)
"""


def silent(_: str) -> None:
    pass


def test_made_once(tmp_path: Path) -> None:
    made: list[Path] = []

    def make(folder: Path) -> None:
        folder.mkdir()
        made.append(folder)

    for _ in range(2):
        assert cache.ensure(tmp_path / "a" / "b", make, silent) == tmp_path / "a" / "b"
    assert made == [tmp_path / "a" / "b"]


def test_a_failed_or_interrupted_folder_is_made_again(tmp_path: Path) -> None:
    def fails(folder: Path) -> None:
        folder.mkdir()
        (folder / "half").touch()
        raise LocalError("no")

    def make(folder: Path) -> None:
        folder.mkdir()

    with pytest.raises(LocalError):
        cache.ensure(tmp_path / "x", fails, silent)
    assert (tmp_path / "x" / "half").exists()
    assert not cache.is_whole(tmp_path / "x")
    cache.ensure(tmp_path / "x", make, silent)
    assert not (tmp_path / "x" / "half").exists()
    assert cache.is_whole(tmp_path / "x")


def test_two_processes_make_it_once(tmp_path: Path) -> None:
    words = [sys.executable, "-c", RACER, str(tmp_path / "shared"), str(tmp_path / "count")]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    racers = [subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [racer.communicate(timeout=30)[0] for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0]
    assert (tmp_path / "count").read_text() == "made\n"
    assert sum("waiting" in text for text in said) == 1


def test_waiting_has_an_end(tmp_path: Path) -> None:
    with (tmp_path / "x.lock").open("w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(LocalError, match="another process"):
            cache.ensure(tmp_path / "x", Path.mkdir, silent, wait=0.3)


def test_the_root_follows_the_desktop_convention(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.root() == tmp_path / "deeplink"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.root() == tmp_path / ".cache" / "deeplink"
