"""The policies that are built in. Pure; registered like those of any plugin.

All but `round_robin`, `weighted` and `session` look at the load, so none of these collapses onto one engine when all
prompts begin alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import xxhash

from deeplink import hookimpl
from deeplink.router.policy import Policy, Snapshot, View

CROWDED = 1.25
"""Times the mean load at which an engine is passed over by `consistent_hash`."""
_GOLDEN = 0.6180339887498949


@hookimpl
def deeplink_register_policies(register: Callable[[str, Policy], None]) -> None:
    register("round_robin", Policy(round_robin))
    register("weighted", Policy(weighted))
    register("least_load", Policy(least_load))
    register("power_of_two", Policy(power_of_two))
    register("consistent_hash", Policy(consistent_hash, reads_prompts=True))
    register("session", Policy(session))
    register("prefix", Policy(prefix, reads_prompts=True))
    register("exact_prefix", Policy(prefix, reads_prompts=True, reads_caches=True))
    register("latency", Policy(latency))


def round_robin(of: Snapshot) -> int:
    return of.turn % len(of.engines)


def weighted(of: Snapshot) -> int:
    """Shares by weight alone. Multiples of the golden ratio fall evenly, so each gets its share in every stretch."""
    point = (of.turn * _GOLDEN % 1.0) * sum(view.weight for view in of.engines)
    for index, view in enumerate(of.engines):
        point -= view.weight
        if point < 0:
            return index
    return len(of.engines) - 1


def least_load(of: Snapshot) -> int:
    """The fewest tokens in flight for its weight, then the fewest requests, then in turn."""
    return _least(of, lambda view: (view.prefill + view.decode) / view.weight)


def power_of_two(of: Snapshot) -> int:
    """The less loaded of two at random: nearly as even as the least of all, and no herd where others choose too."""
    count = len(of.engines)
    if count == 1:
        return 0
    first = int(of.dice[0] * count)
    second = (first + 1 + int(of.dice[1] * (count - 1))) % count
    one, other = of.engines[first], of.engines[second]
    return second if _busy(other) < _busy(one) else first


def session(of: Snapshot) -> int:
    """All of a session at one engine for as long as it is there; requests without one go by load."""
    return _ranked(of, of.session)[0] if of.session else least_load(of)


def consistent_hash(of: Snapshot) -> int:
    """By session, else by how the prompt begins; past engines that have much more to do than the others."""
    key = of.session or (str(of.start) if of.start else "")
    if not key:
        return least_load(of)
    total = sum(view.weight for view in of.engines)
    mean = (sum(view.tokens for view in of.engines) + of.tokens) / total
    for index in _ranked(of, key):
        view = of.engines[index]
        if view.tokens <= CROWDED * mean * view.weight:
            return index
    return least_load(of)


def prefix(of: Snapshot) -> int:
    """The least work still to do if this prompt came on top: an engine that probably holds the beginning of it is
    better by that many tokens, and no more. As `exact_prefix` it goes by what the engines say, where they say it."""
    return _least(of, lambda view: (view.tokens + max(0, of.tokens - view.cached)) / view.weight)


def latency(of: Snapshot) -> int:
    """The least time by what tokens took at each engine lately. One not known yet counts as the best known."""
    known = [view.seconds for view in of.engines if view.seconds > 0]
    best = min(known) if known else 1.0
    return _least(of, lambda view: (view.seconds or best) * (view.tokens + of.tokens))


def _busy(view: View) -> tuple[float, int]:
    return view.tokens / view.weight, view.requests


def _least(of: Snapshot, cost: Callable[[View], float]) -> int:
    count, turn = len(of.engines), of.turn
    best, least = 0, (math.inf, 0, 0)
    for index, view in enumerate(of.engines):
        this = cost(view), view.requests, (index - turn) % count
        if this < least:
            best, least = index, this
    return best


def _ranked(of: Snapshot, key: str) -> list[int]:
    """The engines in this key's own order, in which no engine's place among the others depends on who else is there:
    when one goes, only its keys move (rendezvous hashing)."""

    def place(index: int) -> int:
        return xxhash.xxh3_64_intdigest(f"{of.engines[index].name}\0{key}".encode(errors="surrogatepass"))

    return sorted(range(len(of.engines)), key=place, reverse=True)
