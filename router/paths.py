"""Which paths of an engine are clients' business. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

OPERATORS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""These change the engine for everybody."""


def passes(path: str, allowed: Iterable[str]) -> bool:
    """Whether a request for this path (decoded, without the query) may go to an engine."""
    segments = path.split("/")[1:]
    # A path that is written in more than one way is not matched but refused.
    if any(part in (".", "..") for part in segments) or "" in segments[:-1] or "\\" in path or "%" in path:
        return False
    if not path.isprintable():
        return False
    bare = path.rstrip("/")
    return bare not in OPERATORS and any(fnmatchcase(path, pattern) for pattern in allowed)
