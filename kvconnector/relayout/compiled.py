"""Whether compiled loops do the work (numba's, where it can be imported), or numpy."""

from __future__ import annotations

import logging
import os
import time
from importlib import import_module
from typing import Literal

from deeplink.errors import ConfigError

_log = logging.getLogger(__name__)

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


def warm(by: By | None = None) -> float:
    """Compile what re-layout and digests need, for every layout and element size; the seconds it took.

    The first time on a machine that is about ten, and half a second wherever the result can be kept on disk (beside
    the modules, or in ``NUMBA_CACHE_DIR``). Without this the first handoff waits that long. Where nothing is compiled
    it is 0; should numba not be able to on this machine, that is logged, and numpy does it.
    """
    if not wanted(by):
        return 0.0
    start = time.perf_counter()
    from numba.core.errors import NumbaError

    from deeplink.kvconnector.relayout import kernels, xxh3
    from deeplink.kvconnector.transport import windows

    try:
        kernels.warm()
        xxh3.warm()
        windows.warm()
    except NumbaError as exc:
        if by or os.environ.get(VARIABLE):
            raise
        _log.warning("numba cannot compile the loops of re-layout, numpy will do it: %s", exc)
        _usable.append(False)
    return time.perf_counter() - start


_usable: list[bool] = []
"""What has been found out; the last counts."""


def _there() -> bool:
    if not _usable:
        try:
            import_module("numba")
        except ImportError:  # not installed, or not for this numpy
            _usable.append(False)
        else:
            _usable.append(True)
    return _usable[-1]
