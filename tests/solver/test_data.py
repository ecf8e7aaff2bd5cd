"""What comes along is in the wheel, and says where it is from."""

from __future__ import annotations

import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "solver" / "data", ROOT / "benchmarks" / "data")


def test_all_of_it_is_packaged() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["deeplink.solver"]
    for path in FOLDERS[0].rglob("*"):
        if path.is_file():
            name = path.relative_to(ROOT / "solver").as_posix()
            assert any(name.count("/") == p.count("/") and fnmatch(name, p) for p in patterns), name


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.parent.name)
def test_all_of_it_is_attributed(folder: Path) -> None:
    sources = (folder / "SOURCES.md").read_text()
    for path in folder.rglob("*"):
        if path.is_file() and path.name != "SOURCES.md":
            name = path.relative_to(folder).as_posix()
            assert f"`{name}`" in sources or f"`{name.split('/')[0]}/*{path.suffix}`" in sources, name
