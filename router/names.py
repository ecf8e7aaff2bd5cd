"""What headers mean, by their names as they come: bytes or text, in any case. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

MOST, LONGEST = 1024, 64
"""Names that are remembered: those that are really used, however many somebody makes up."""

T = TypeVar("T")


class Names(dict[str | bytes, T]):
    """`meanings` by names in lower case, `other` for all other names."""

    def __init__(self, meanings: Mapping[str, T] | Callable[[str], T], other: T) -> None:
        super().__init__()
        self._meanings = meanings
        self._other = other

    def __missing__(self, name: str | bytes) -> T:
        lower = (name if isinstance(name, str) else name.decode("latin-1")).lower()
        meanings = self._meanings
        meaning = meanings.get(lower, self._other) if isinstance(meanings, Mapping) else meanings(lower)
        if len(self) < MOST and len(name) <= LONGEST:
            self[name] = meaning
        return meaning
