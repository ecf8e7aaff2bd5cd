"""The built-in policies: pure functions of a snapshot."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.plugins import load_plugins
from deeplink.router import policies
from deeplink.router.policy import Snapshot, View

NAMES = ("round_robin", "weighted", "least_load", "power_of_two", "consistent_hash", "session", "prefix", "latency")


def snapshot(*views: View, **more: object) -> Snapshot:
    return replace(Snapshot("prefill", views), **more)  # type: ignore[arg-type]


def views(count: int) -> tuple[View, ...]:
    return tuple(View(f"e{index}") for index in range(count))


def run(pick: Callable[[Snapshot], int], count: int, engines: int = 8, **more: object) -> Counter[int]:
    """Places that `count` requests of 100 tokens go to; each stays."""
    dice = random.Random(1)
    held = [0] * engines
    for turn in range(count):
        seen = tuple(View(f"e{index}", held[index], 0, held[index] // 100) for index in range(engines))
        asked = snapshot(*seen, tokens=100, turn=turn, dice=(dice.random(), dice.random()), **more)
        held[pick(asked)] += 100
    return Counter({index: tokens // 100 for index, tokens in enumerate(held)})


def test_all_are_registered_as_plugins() -> None:
    found = load_plugins().policies
    assert set(NAMES) <= set(found.items)


@given(
    st.sampled_from(NAMES),
    st.lists(
        st.builds(
            View,
            st.uuids().map(str),
            st.integers(0, 1000),
            st.integers(0, 1000),
            st.integers(0, 9),
            st.floats(0.1, 10),
            st.floats(0, 1),
            st.integers(0, 500),
        ),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 1000),
    st.integers(0, 1 << 40),
    st.tuples(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)),
    st.text(),
    st.integers(0, (1 << 64) - 1),
)
def test_every_policy_takes_one_of_the_engines_and_always_the_same(
    name: str,
    engines: list[View],
    tokens: int,
    turn: int,
    dice: tuple[float, float],
    session: str,
    start: int,
) -> None:
    of = Snapshot("decode", tuple(engines), tokens, turn, dice, session, start)
    pick = getattr(policies, name)
    assert 0 <= pick(of) < len(engines)
    assert pick(of) == pick(of)


def test_round_robin() -> None:
    assert run(policies.round_robin, 80) == Counter(dict.fromkeys(range(8), 10))


def test_weighted_gives_each_its_share_in_every_stretch() -> None:
    engines = (View("a", weight=1), View("b", weight=3))
    for start in (0, 777, 10**9):
        got = Counter(policies.weighted(snapshot(*engines, turn=start + turn)) for turn in range(100))
        assert abs(got[0] - 25) <= 2


def test_least_load_counts_tokens_not_requests() -> None:
    many, large = View("many", 100, 0, 10), View("large", 30_000, 0, 1)
    assert policies.least_load(snapshot(many, large)) == 0
    assert policies.least_load(snapshot(View("a", 0, 500), View("b", 300, 100))) == 1


def test_least_load_goes_by_weight() -> None:
    assert policies.least_load(snapshot(View("slow", 100), View("fast", 150, weight=2))) == 1


def test_equals_take_turns() -> None:
    for pick in (policies.least_load, policies.prefix, policies.latency):
        assert {pick(snapshot(*views(4), turn=turn)) for turn in range(4)} == {0, 1, 2, 3}


def test_power_of_two_is_nearly_even_and_never_takes_the_busier() -> None:
    assert max(run(policies.power_of_two, 800).values()) < 110
    two = (View("a", 1), View("b", 0))
    assert {policies.power_of_two(snapshot(*two, dice=(x / 9, y / 9))) for x in range(9) for y in range(9)} == {1}


@pytest.mark.parametrize("name", ["session", "consistent_hash"])
def test_a_session_stays_and_only_its_own_move_when_an_engine_goes(name: str) -> None:
    pick = getattr(policies, name)
    eight = views(8)
    before = {f"s{n}": eight[pick(snapshot(*eight, session=f"s{n}"))].name for n in range(400)}
    assert min(Counter(before.values()).values()) > 20
    seven = eight[:3] + eight[4:]
    for session, name in before.items():
        after = seven[pick(snapshot(*seven, session=session))].name
        assert after == name or name == "e3"


def test_a_session_stays_under_load_and_a_hash_does_not() -> None:
    assert len(run(policies.session, 100, session="s")) == 8
    assert sorted(run(policies.session, 100, session="s").values())[-1] == 100
    assert max(run(policies.consistent_hash, 100, session="s").values()) < 30


@pytest.mark.parametrize("name", ["least_load", "power_of_two", "consistent_hash", "prefix", "latency"])
def test_none_collapses_when_all_prompts_share_a_prefix(name: str) -> None:
    got = run(getattr(policies, name), 800, start=42)
    assert max(got.values()) <= 130, got


def test_prefix_weighs_what_is_cached_against_what_is_to_do() -> None:
    holder, idle = View("holder", 300, cached=400), View("idle")
    assert policies.prefix(snapshot(holder, idle, tokens=500)) == 0
    assert policies.prefix(snapshot(replace(holder, prefill=500), idle, tokens=500)) == 1


def test_latency_takes_the_faster_until_it_has_more_to_do() -> None:
    slow, fast = View("slow", seconds=0.02), View("fast", seconds=0.01)
    assert policies.latency(snapshot(slow, fast, tokens=100)) == 1
    assert policies.latency(snapshot(slow, replace(fast, prefill=150), tokens=100)) == 0
    assert policies.latency(snapshot(slow, View("new"), tokens=100, turn=1)) == 1
