"""Running engines, apart from what only plans say of them.

Candidates of one pool, size, role and limits of a step are the same process: they differ in how long requests may wait
before them, and which. So a running engine can take the place of any of its kind, and only the router has to know.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from deeplink.solver.fleets.candidates import Formulation
from deeplink.solver.placement import Route


@dataclass(frozen=True, slots=True)
class Kind:
    """`batch` and `chunk` are the sequences and tokens of a step at most."""

    pool: int
    chips: int
    role: str
    batch: int
    chunk: int


def kinds(formulation: Formulation) -> list[Kind]:
    """Of each candidate."""
    found = []
    for candidate in formulation.problem.candidates:
        setup = formulation.setups[candidate.name]
        found.append(Kind(candidate.pool, candidate.chips, candidate.role, setup.batch, setup.chunk))
    return found


def of_kind(of: list[Kind], counts: Mapping[int, int]) -> dict[Kind, int]:
    """How many engines of each kind these are."""
    found: dict[Kind, int] = {}
    for k, count in counts.items():
        found[of[k]] = found.get(of[k], 0) + count
    return found


def taken_over(
    of: list[Kind], running: Mapping[int, int], wanted: Mapping[int, int]
) -> dict[int, dict[int, int]] | None:
    """For each wanted candidate which running ones are to be it, and how many of each: all of a running candidate for
    one wanted. Itself where it is wanted as often as it runs, else all that are left of the kind for the one that is
    left. None where they do not come out even: then engines of one name would have to be told apart."""
    found: dict[int, dict[int, int]] = {}
    left = dict(running)
    for k in [k for k, count in wanted.items() if left.get(k) == count]:
        found[k] = {k: left.pop(k)}
    for k, count in wanted.items():
        if k in found:
            continue
        mine = {other: number for other, number in left.items() if of[other] == of[k]}
        if sum(mine.values()) != count:
            return None
        found[k] = mine
        for other in mine:
            del left[other]
    return None if left else found


def renamed(routes: Iterable[Route], names: Mapping[str, Mapping[str, int]]) -> tuple[Route, ...]:
    """The routes with running engines in place of those that they name, each by its number."""
    found: dict[tuple[str, str, str], Route] = {}
    for route in routes:
        first, second = names[route.prefill], names[route.decode]
        alone = route.prefill == route.decode
        pairs = [(a, a) for a in first] if alone else [(a, b) for a in first for b in second]
        total = sum(first.values()) * (1 if alone else sum(second.values()))
        for a, b in pairs:
            part = first[a] * (1 if alone else second[b]) / total
            key = route.bucket, a, b
            before = found.get(key)
            found[key] = msgspec.structs.replace(
                route,
                prefill=a,
                decode=b,
                rate=route.rate * part + (before.rate if before else 0.0),
                weight=route.weight * part + (before.weight if before else 0.0),
            )
    return tuple(found.values())
