"""How compiled loops are compiled. Needs numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

part = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""A piece of a loop: nothing but compiled code calls it."""


def whole(function: Callable[..., Any]) -> Any:
    """What Python calls. It runs without the interpreter's lock, and its machine code is kept on disk.

    numba looks at the age of the function's own file alone, so whoever edits a module that such a function uses
    removes what was kept (``__pycache__/*.nb?``).
    """
    try:
        return njit(error_model="numpy", nogil=True, cache=True)(function)
    except RuntimeError:  # there is no folder that numba could write to
        return njit(error_model="numpy", nogil=True)(function)
