"""The running deeplink as a folder for PYTHONPATH, so that an engine environment need not have it installed.

The folder holds the packages as they are imported, and a dist-info, because engines find their plugins
through entry points. From a checkout (editable install, or its packages on PYTHONPATH) both come from its
pyproject.toml, so they are never older than the sources; from a normal install they are the installed files.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import time
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import deeplink
from deeplink.errors import LocalError
from deeplink.local import cache
from deeplink.local.cache import Progress

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NAME = "deeplink"
UNUSED_SECONDS = 7 * 86400.0

# What a file is called below the overlay, and where its content is.
Files = dict[str, Path]
Texts = dict[str, str]


def ensure(progress: Progress) -> Path:
    """The overlay of the deeplink that runs this. An edited source file makes another one.

    Raises LocalError when neither a checkout nor an installed distribution can be found.
    """
    files, texts = _contents(Path(deeplink.__file__).resolve().parents[1])
    folder = cache.root() / "overlays" / _key(files, texts)

    def make(target: Path) -> None:
        for name, source in files.items():
            _place(target, name)
            shutil.copyfile(source, target / name)
        for name, text in texts.items():
            _place(target, name)
            (target / name).write_text(text)

    cache.ensure(folder, make, progress)
    (folder / cache.MARKER).touch()  # last used now
    _remove_unused(folder)
    return folder


def _place(target: Path, name: str) -> None:
    (target / name).parent.mkdir(parents=True, exist_ok=True)


def _contents(root: Path) -> tuple[Files, Texts]:
    pyproject = _project(root)
    if pyproject is not None:
        return _from_checkout(root, pyproject)
    try:
        return _from_distribution(distribution(NAME)), {}
    except PackageNotFoundError:
        raise LocalError(
            f"deeplink runs from {root}, which is neither a checkout nor an installed distribution",
            remedy="install it: pip install deeplink, or pip install -e <checkout>",
        ) from None


def _project(root: Path) -> dict[str, Any] | None:
    """The pyproject.toml of `root` if that is a checkout of deeplink."""
    try:
        data: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        return None
    return data if data.get("project", {}).get("name") == NAME else None


def _from_checkout(root: Path, pyproject: dict[str, Any]) -> tuple[Files, Texts]:
    folders: dict[str, str] = pyproject["tool"]["setuptools"]["package-dir"]
    files = {
        f"{package.replace('.', '/')}/{path.relative_to(root / folder)}": path
        for package, folder in folders.items()
        for path in _sources(root / folder)
    }
    project = pyproject["project"]
    info = f"{NAME}-{project['version']}.dist-info"
    groups: dict[str, dict[str, str]] = project.get("entry-points", {})
    sections = (
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group, points in groups.items()
    )
    return files, {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {project['version']}\n",
        f"{info}/entry_points.txt": "\n".join(sections),
    }


def _sources(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path


def _from_distribution(found: Distribution) -> Files:
    """Its packages and its dist-info; scripts lie outside of site-packages and are not needed."""
    return {
        str(name): Path(str(name.locate()))
        for name in found.files or ()
        if ".." not in name.parts and "__pycache__" not in name.parts
    }


def _key(files: Files, texts: Texts) -> str:
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(name.encode() + b"\0" + hashlib.sha256(files[name].read_bytes()).digest())
    for name in sorted(texts):
        digest.update(name.encode() + b"\0" + texts[name].encode() + b"\0")
    return digest.hexdigest()[:16]


def _remove_unused(current: Path) -> None:
    """Every edit leaves an overlay behind; those not started from for a week go."""
    for folder in current.parent.iterdir():
        marker = folder / cache.MARKER
        if folder == current or not marker.exists():
            continue
        if time.time() - marker.stat().st_mtime > UNUSED_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)
            folder.with_name(f"{folder.name}.lock").unlink(missing_ok=True)
