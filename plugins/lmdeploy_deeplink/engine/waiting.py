"""LMDeploy in a process that deeplink has not started: changed when it is imported, if it ever is.

What is imported here is what every process pays that an engine's environment has reached, LMDeploy's or not.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

VARIABLE = "DEEPLINK_LMDEPLOY_DEVICE"
"""LMDeploy's name of the device that the engine runs on, in the environment of its processes."""
_CHANGED = "lmdeploy"


def wait() -> None:
    """Change LMDeploy for the device that the environment names when it is imported here."""
    sys.meta_path.insert(0, _Finder(os.environ[VARIABLE]))


class _Finder(MetaPathFinder):
    """Stands before the others until LMDeploy is looked for."""

    def __init__(self, device: str) -> None:
        self._device = device

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _CHANGED:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._device)
        return spec


class _Loader(Loader):
    """Executes the module as `loader` does, with what is deeplink's before and after, and leaves it to that."""

    def __init__(self, loader: Loader, device: str) -> None:
        self._loader = loader
        self._device = device

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        from lmdeploy_deeplink.engine import platform, versions

        hooks = versions.hooks()
        if self._device == platform.CPU:
            from lmdeploy_deeplink.engine import cpu

            cpu.install()  # before LMDeploy takes names from torch
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        hooks.install(self._device)
