"""Libraries that the developers' environment may lack: their tests are skipped with the reason, but not in CI."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from deeplink.errors import ConfigError


def need(load: Callable[[], object]) -> None:
    """`load` raises ConfigError where its library cannot be loaded, which `make fabric` cures."""
    try:
        load()
    except ConfigError as exc:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(exc), allow_module_level=True)
