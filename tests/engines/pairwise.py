"""Covering arrays: few rows in which every two values of every two factors meet. Greedy, and the same every time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

Side = TypeVar("Side", bound=tuple[object, ...])
Covered = tuple[int, object, int, object]


def covered(*sides: Sequence[object]) -> set[Covered]:
    """The values of every two factors of a row, which is all of its sides' factors together."""
    values = [value for side in sides for value in side]
    return {(i, values[i], j, values[j]) for i, j in itertools.combinations(range(len(values)), 2)}


def rows(sides: Sequence[Side]) -> list[tuple[Side, Side]]:
    """Pairs of unlike `sides` that cover all that any pair of them covers; each covers most of what is left."""
    covers = {(a, b): covered(a, b) for a in sides for b in sides if a != b}
    left = set().union(*covers.values())
    chosen: list[tuple[Side, Side]] = []
    while left:
        best = max(covers, key=lambda row: len(covers[row] & left))
        chosen.append(best)
        left -= covers[best]
    return chosen


def sharing(chosen: Sequence[tuple[Side, Side]], kept: int) -> list[tuple[Side, Side]]:
    """The same rows, in an order in which many have a side among the last `kept` that were used."""
    left = list(chosen)
    ordered: list[tuple[Side, Side]] = []
    recent: list[Side] = []
    while left:
        row = max(left, key=lambda row: len(set(row) & set(recent)))
        left.remove(row)
        ordered.append(row)
        recent = [side for side in recent if side not in row][-(kept - 2) :] + list(row)
    return ordered
