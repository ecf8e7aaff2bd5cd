"""At which line of a TOML file a field is. The parser of the standard library does not say."""

from __future__ import annotations

import re
from collections.abc import Sequence

Path = Sequence[str | int]

_HEADER = re.compile(r"\s*(\[\[?)\s*([A-Za-z0-9_.\-\"' ]+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"\s*([A-Za-z0-9_\-]+|\"[^\"]+\"|'[^']+')\s*(?:\.\s*[A-Za-z0-9_\-.]+\s*)?=")


def line(text: str, path: Path) -> int:
    """The line of the deepest part of `path` that has one, counted from 1; 0 when no part of it is written down.

    Enough for files as people write them: tables with headers, one key a line. What is inside an inline table or a list
    over several lines is at the line where that begins.
    """
    found = 0
    deepest = 0
    for number, here in _places(text):
        common = 0
        for mine, theirs in zip(here, path, strict=False):
            if mine != theirs:
                break
            common += 1
        if common == len(here) and common > deepest:
            found, deepest = number, common
    return found


def _places(text: str) -> list[tuple[int, tuple[str | int, ...]]]:
    places: list[tuple[int, tuple[str | int, ...]]] = []
    table: tuple[str | int, ...] = ()
    counts: dict[tuple[str | int, ...], int] = {}
    for number, content in enumerate(text.splitlines(), 1):
        header = _HEADER.match(content)
        if header is not None:
            names = tuple(part.strip().strip("\"'") for part in header[2].split("."))
            table = _inside(names[:-1], counts)
            if header[1] == "[[":
                whole = (*table, names[-1])
                counts[whole] = counts.get(whole, -1) + 1
                table = (*whole, counts[whole])
            else:
                table = (*table, names[-1])
            places.append((number, table))
        elif key := _KEY.match(content):
            places.append((number, (*table, key[1].strip("\"'"))))
    return places


def _inside(names: Sequence[str], counts: dict[tuple[str | int, ...], int]) -> tuple[str | int, ...]:
    """Where a header's leading names lead: into the last element of each list of tables."""
    place: tuple[str | int, ...] = ()
    for name in names:
        place = (*place, name)
        if place in counts:
            place = (*place, counts[place])
    return place
