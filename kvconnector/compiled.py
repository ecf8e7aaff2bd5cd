"""Which loops do the work: numba's where it can be imported, else numpy's."""

from __future__ import annotations

import os
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Literal

from deeplink.errors import ConfigError

By = Literal["numpy", "numba"]
VARIABLE = "DEEPLINK_RELAYOUT"


def kernels(by: By | None = None) -> ModuleType | None:
    """`deeplink.kvconnector.kernels`, or None where numpy does it. Raises ImportError when numba is insisted on."""
    wanted = by or os.environ.get(VARIABLE) or None
    if wanted not in (None, "numpy", "numba"):
        raise ConfigError(f"{VARIABLE} is {wanted!r}; it is numpy or numba")
    if wanted == "numpy":
        return None
    try:
        return _load()
    except ImportError:
        if wanted:
            raise
        return None


@lru_cache
def _load() -> ModuleType:
    return import_module("deeplink.kvconnector.kernels")
