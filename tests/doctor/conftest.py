from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import plugin_path
import pytest
from looking import SECRET

from deeplink import config as configs
from deeplink.plugins import DISABLE, ONLY


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, and no configuration from outside."""
    for variable in (configs.VARIABLE, ONLY, DISABLE):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "secret").chmod(0o600)
    return tmp_path


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Installs a plugin: its name, and the source of its module."""
    folder = tmp_path / "plugins"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    names = []

    def _install(name: str, source: str) -> None:
        names.append(name)
        plugin_path.install(folder, name, source)

    yield _install
    for name in names:
        sys.modules.pop(name, None)  # the next test's has the same name
