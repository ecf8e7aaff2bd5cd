"""Libraries that the developers' environment may lack: their tests are skipped with the reason, but not in CI."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deeplink.errors import ConfigError

UNPACKED = Path(sys.prefix) / "fabric"
"""Where tools/fabric.py puts the system's libraries if the system has none."""


def need(load: Callable[[], object]) -> None:
    """`load` raises ConfigError where its library cannot be loaded, which `make fabric` cures."""
    _preload()
    try:
        load()
    except ConfigError as exc:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"{exc}; for tests: make fabric", allow_module_level=True)


def _preload() -> None:
    """Into this process, and by its environment into those that it starts."""
    for name in ("libnl-3.so.200", "libnl-route-3.so.200", "libibverbs.so.1"):
        for file in UNPACKED.rglob(name):
            # Not for everyone in this process: NIXL brings its own copy, and with a mixture of two crashes at its exit.
            ctypes.CDLL(str(file))
            path = os.environ.get("LD_LIBRARY_PATH", "")
            if str(file.parent) not in path.split(":"):
                os.environ["LD_LIBRARY_PATH"] = f"{file.parent}:{path}".rstrip(":")
