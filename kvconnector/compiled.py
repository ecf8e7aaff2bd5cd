"""Whether compiled loops do the work (numba's, where it can be imported), or numpy."""

from __future__ import annotations

import os
from functools import lru_cache
from importlib import import_module
from typing import Literal

from deeplink.errors import ConfigError

By = Literal["numpy", "numba"]
VARIABLE = "DEEPLINK_RELAYOUT"


def wanted(by: By | None = None) -> bool:
    """Whether to use the modules that need numba. `by`, or else the environment variable ``DEEPLINK_RELAYOUT``,
    insists on one or the other; raises ImportError when that is numba and it cannot be imported."""
    insisted = by or os.environ.get(VARIABLE) or ""
    if insisted not in ("", "numpy", "numba"):
        raise ConfigError(f"{VARIABLE} is {insisted!r}; it is numpy or numba")
    if insisted == "numpy":
        return False
    if insisted == "numba":
        import_module("numba")
        return True
    return _there()


@lru_cache
def _there() -> bool:
    try:
        import_module("numba")
    except ImportError:  # not installed, or not for this numpy
        return False
    return True
