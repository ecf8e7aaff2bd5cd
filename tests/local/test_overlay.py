"""An engine that has deeplink's overlay on its PYTHONPATH finds deeplink's packages and plugins."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib.metadata import Distribution
from pathlib import Path

import pytest

import deeplink
from deeplink.errors import LocalError
from deeplink.local import cache, overlay

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(deeplink.__file__).resolve().parents[1]

GROUPS = ("deeplink", "vllm.platform_plugins", "vllm.general_plugins")

LOOK = """
import importlib.util, sys
from importlib.metadata import entry_points, version
print(version("deeplink"))
for group in sys.argv[1:]:
    for point in sorted(entry_points(group=group)):
        print(group, point.name, point.value)
for name in ("deeplink", "deeplink.kvconnector.contracts.contract", "deeplink.router", "vllm_deeplink"):
    print(importlib.util.find_spec(name).origin)
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_another_python_finds_everything_in_it() -> None:
    folder = overlay.ensure(lambda _: None)
    output = subprocess.check_output(
        [sys.executable, "-c", LOOK, *GROUPS], env={"PYTHONPATH": str(folder)}, cwd="/", text=True
    ).splitlines()
    assert output[0] == deeplink.__version__
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    stated = {f"{group} {name} {value}" for group in GROUPS for name, value in points.get(group, {}).items()}
    assert stated
    assert stated <= set(output)
    assert all(line.startswith(str(folder)) for line in output[-4:])


def test_the_lock_files_come_along() -> None:
    folder = overlay.ensure(lambda _: None)
    assert list((folder / "deeplink" / "local").glob("*.lock"))
    assert not list(folder.rglob("__pycache__"))


def test_same_sources_same_overlay() -> None:
    assert overlay.ensure(lambda _: None) == overlay.ensure(lambda _: None)


def test_an_edit_makes_another(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    (checkout / "pkg").mkdir(parents=True)
    (checkout / "pkg" / "__init__.py").write_text("a = 1\n")
    pyproject = {
        "project": {"name": "deeplink", "version": "9", "entry-points": {"g": {"n": "pkg:a"}}},
        "tool": {"setuptools": {"package-dir": {"pkg": "pkg"}}},
    }
    before = overlay._from_checkout(checkout, pyproject)
    key = overlay._key(*before)
    (checkout / "pkg" / "__init__.py").write_text("a = 2\n")
    assert overlay._key(*overlay._from_checkout(checkout, pyproject)) != key
    assert before[1]["deeplink-9.dist-info/entry_points.txt"] == "[g]\nn = pkg:a\n"


def test_an_installed_distribution_is_copied_by_its_own_list(tmp_path: Path) -> None:
    info = tmp_path / "deeplink-7.dist-info"
    info.mkdir()
    (tmp_path / "deeplink").mkdir()
    (tmp_path / "deeplink" / "__init__.py").touch()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deeplink\nVersion: 7\n")
    (info / "RECORD").write_text(
        "deeplink/__init__.py,,\ndeeplink/__pycache__/__init__.pyc,,\ndeeplink-7.dist-info/METADATA,,\n"
        "../../../bin/deeplink,,\n"
    )
    files = overlay._from_distribution(Distribution.at(info))
    assert set(files) == {"deeplink/__init__.py", "deeplink-7.dist-info/METADATA"}
    assert files["deeplink/__init__.py"] == tmp_path / "deeplink" / "__init__.py"


def test_neither_a_checkout_nor_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(LocalError, match="neither a checkout nor an installed distribution"):
        overlay._contents(tmp_path)


def test_overlays_no_one_started_from_for_long_are_removed() -> None:
    current = overlay.ensure(lambda _: None)
    old, recent = current.with_name("old"), current.with_name("recent")
    for folder in (old, recent):
        folder.mkdir()
        (folder / cache.MARKER).touch()
    long_ago = time.time() - overlay.UNUSED_SECONDS - 60
    os.utime(old / cache.MARKER, (long_ago, long_ago))
    overlay.ensure(lambda _: None)
    assert not old.exists()
    assert recent.exists()
    assert current.exists()
