"""The platform `deeplink`: whatever platform SGLang would run on without it.

A platform describes the chip, which the vendor's plugin or SGLang itself does better; SGLang takes one only. So this
one steps aside, and where it is asked for by name, names the class that would have been chosen.
"""

from __future__ import annotations

import os

VARIABLE = "SGLANG_PLATFORM"
NAME = "deeplink"


def activate() -> str | None:
    """None unless ``SGLANG_PLATFORM=deeplink``; then the name of the class that SGLang finds without that."""
    if os.environ.get(VARIABLE) != NAME:
        return None
    from sglang.srt import platforms

    del os.environ[VARIABLE]
    try:
        found = type(platforms._resolve_platform())
    finally:
        os.environ[VARIABLE] = NAME
    return f"{found.__module__}.{found.__qualname__}"
