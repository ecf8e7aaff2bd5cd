"""What headers mean, by their names as they come: bytes or text, in any case. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

MOST, LONGEST = 1024, 64
"""Names that are remembered: those that are really used, however many somebody makes up."""


class Names(dict[str | bytes, int]):
    """`meanings` by names in lower case, 0 for all others."""

    def __init__(self, meanings: Mapping[str, int] | Callable[[str], int]) -> None:
        super().__init__()
        self._meanings = meanings

    def __missing__(self, name: str | bytes) -> int:
        lower = (name if isinstance(name, str) else name.decode("latin-1")).lower()
        meanings = self._meanings
        meaning = meanings.get(lower, 0) if isinstance(meanings, Mapping) else meanings(lower)
        if len(self) < MOST and len(name) <= LONGEST:
            self[name] = meaning
        return meaning
