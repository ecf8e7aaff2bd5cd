"""Vendors' platform plugins, made up: real modules with real metadata on a path of their own. Hand-made."""

from __future__ import annotations

from pathlib import Path

GROUP = "vllm.platform_plugins"


def install(
    folder: Path,
    name: str,
    register: str | None = "return None",
    *,
    platform: str | None = None,
    distribution: str = "",
    version: str = "1.2",
    module: str = "",
    group: str = GROUP,
) -> str:
    """A distribution ``vllm-NAME 1.2`` whose plugin `name` has this body of ``register()``; returns its name.

    `platform` is the source of its module ``….platform``, if it has one. With `register` None only the metadata is
    there, as after an installation that was half removed.
    """
    distribution = distribution or f"vllm-{name}"
    module = module or f"vllm_{name}"
    if register is not None:
        package = folder / module
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text(f"def register():\n    {register}\n")
        if platform is not None:
            (package / "platform.py").write_text(platform)
    meta = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    meta.mkdir(parents=True)
    (meta / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (meta / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}:register\n")
    return distribution
