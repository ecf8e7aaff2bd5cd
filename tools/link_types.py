"""Lay the packages out under .types/ as they are imported, for mypy, pyright and editors."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
OUT = ROOT / ".types"


def main() -> None:
    folders: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    shutil.rmtree(OUT, ignore_errors=True)
    for name, folder in sorted(folders.items()):
        target = OUT.joinpath(*name.split("."))
        if any(other.startswith(f"{name}.") for other in folders):
            target.mkdir(parents=True)
            for child in (ROOT / folder).iterdir():
                (target / child.name).symlink_to(child)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(ROOT / folder)


if __name__ == "__main__":
    main()
