"""A path of packages that a test makes up, and none of this environment's settings."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_deeplink import vendors


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (vendors.ALLOWED, vendors.TARGET):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of packages, on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    importlib.invalidate_caches()
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("vllm_"):
            del sys.modules[name]
