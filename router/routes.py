"""The routes of a placement: which engines a request of some length is for, and with which share. Pure.

A request belongs to the routes with the smallest `up_to` that is not below its prompt. Of these it takes one by weight,
and within it the policies choose. What one route cannot serve now, or only with engines that have just failed, another
of the same length may. Only when none of them can are all engines asked, for an answer from an engine that was not
planned for it is better than none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from deeplink.config import RouteEntry
from deeplink.errors import DeeplinkError, Overloaded
from deeplink.router.choice import Pair, Plain, Table

_GOLDEN = 0.6180339887498949

Choose = Callable[[Table, bool], Plain | Pair]
"""Chooses among the engines of a table; with True, only among those that have not just failed."""


class Routes:
    """Remembers how many requests of each length there were, to know whose turn it is."""

    def __init__(self, entries: Sequence[RouteEntry]) -> None:
        lengths = sorted({math.inf if entry.up_to is None else entry.up_to for entry in entries})
        self._groups = {
            upper: tuple(e for e in entries if (math.inf if e.up_to is None else e.up_to) == upper) for upper in lengths
        }
        self._counted: Counter[float] = Counter()
        self._narrowed: dict[RouteEntry, tuple[Table, Table]] = {}

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._groups)

    def choose(self, of: Table, tokens: int, choose: Choose) -> Plain | Pair:
        """What `choose` takes of the first route that can serve the request. Raises what `choose` raises of all engines
        where no route can; Overloaded if some route only has no room, for that is worth waiting for."""
        full: Overloaded | None = None
        ordered = self._ordered(tokens)
        for sound in (True, False):
            for entry in ordered:
                try:
                    return choose(self._narrow(of, entry), sound)
                except Overloaded as exc:
                    full = full or exc
                except DeeplinkError:
                    continue
        if full is not None:
            raise full
        return choose(of, False)

    def _ordered(self, tokens: int) -> list[RouteEntry]:
        """All routes for this length: the one whose turn it is, then the others, the heaviest first."""
        upper = next((upper for upper in self._groups if tokens <= upper), None)
        if upper is None:
            return []
        entries = self._groups[upper]
        turn = self._counted[upper]
        self._counted[upper] += 1
        first = place([entry.weight for entry in entries], turn)
        others = [entry for index, entry in enumerate(entries) if index != first]
        return [entries[first], *sorted(others, key=lambda entry: -entry.weight)]

    def _narrow(self, of: Table, entry: RouteEntry) -> Table:
        """`of` as if there were only the route's engines. Kept until the engines change."""
        before = self._narrowed.get(entry)
        if before is None or before[0] is not of:
            before = self._narrowed[entry] = of, narrow(of, entry)
        return before[1]


def narrow(of: Table, entry: RouteEntry) -> Table:
    prefill, decode = frozenset(entry.prefill), frozenset(entry.decode)
    pairs = tuple(p for p in of.pairs if p.prefill.name in prefill and p.decode.name in decode)
    partners: dict[str, tuple[Pair, ...]] = {}
    for pair in pairs:
        partners[pair.prefill.name] = (*partners.get(pair.prefill.name, ()), pair)
    return Table(
        tuple(engine for engine in of.engines if engine.name in prefill | decode),
        pairs,
        tuple(one for one in of.refused if one[0].name in prefill and one[1].name in decode),
        partners,
    )


def place(weights: Sequence[float], turn: int) -> int:
    """Which of these has its turn. Multiples of the golden ratio fall evenly, so each gets its share in every stretch,
    and one that could not be used for a while is not owed anything."""
    point = (turn * _GOLDEN % 1.0) * sum(weights)
    for index, weight in enumerate(weights):
        point -= weight
        if point < 0:
            return index
    return len(weights) - 1
