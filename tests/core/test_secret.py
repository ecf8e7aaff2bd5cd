"""The shared secret: made once, for its user alone."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from deeplink import secret
from deeplink.errors import ConfigError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def test_made_on_first_use_for_its_user_alone(home: Path) -> None:
    previous = os.umask(0)
    try:
        first = secret.load()
    finally:
        os.umask(previous)
    path = secret.default_path()
    assert path == home / "state" / "deeplink" / "secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert len(first) == 64
    assert secret.load() == first
    assert [child.name for child in path.parent.iterdir()] == ["secret"]


def test_without_a_state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert secret.default_path() == tmp_path / ".local" / "state" / "deeplink" / "secret"


def test_processes_that_start_at_once_agree(home: Path) -> None:
    program = "import sys; sys.stdin.read(1); from deeplink import secret; print(secret.load().hex())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    several = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for _ in range(4)
    ]
    for process in several:  # all are waiting; let them go together
        assert process.stdin is not None
        process.stdin.write("x")
        process.stdin.flush()
    found = {process.communicate(timeout=50)[0].strip() for process in several}
    assert found == {secret.load().hex()}
    assert [child.name for child in secret.default_path().parent.iterdir()] == ["secret"]


def test_the_loser_of_the_race_reads_the_winners(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def late(source: os.PathLike[str], target: os.PathLike[str]) -> None:
        Path(target).write_text("the winner's, which is long enough\n")
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    assert secret.load() == b"the winner's, which is long enough"
    assert [child.name for child in secret.default_path().parent.iterdir()] == ["secret"]


@pytest.mark.parametrize("content", ["", "x~y~z", "x" * 15, f" {'x' * 15}\n\n"])
def test_a_short_secret(tmp_path: Path, content: str) -> None:
    path = tmp_path / "secret"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        secret.load(path)
    assert caught.value.field == "secret_file"
    assert caught.value.ours == f"{len(content.strip())} bytes"
    assert str(path) in caught.value.message
    assert not content.strip() or content.strip() not in str(caught.value)


def test_space_around_it_does_not_enter(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"  0123456789abcdef\r\n")
    assert secret.load(path) == b"0123456789abcdef"


def test_a_named_file_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the secret file"):
        secret.load(tmp_path / "gone")
    assert not list(tmp_path.iterdir())


def test_a_state_folder_that_cannot_be(home: Path) -> None:
    (home / "state").write_text("a file where the folder should be")
    with pytest.raises(ConfigError, match="cannot make the secret file") as caught:
        secret.load()
    assert caught.value.field == "secret_file"


def test_each_purpose_has_its_own_key() -> None:
    keys = {secret.derive(key, purpose) for key in (b"a" * 16, b"b" * 16) for purpose in ("channel", "control", "x")}
    assert len(keys) == 6
    assert secret.control_token(b"a" * 16) == secret.derive(b"a" * 16, "control").hex()
