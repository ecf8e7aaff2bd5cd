"""Running engines in place of planned ones of their kind."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.solver.placement import Route
from deeplink.solver.running import Kind, of_kind, renamed, taken_over

KINDS = [Kind(0, 1, "prefill", 1, 0), Kind(0, 1, "decode", 8, 0)]
OF = [KINDS[0]] * 3 + [KINDS[1]] * 3
COUNTS = st.dictionaries(st.integers(0, 5), st.integers(1, 4))


def test_one_stands_for_itself_and_else_for_all_that_are_left() -> None:
    assert taken_over(OF, {0: 2, 1: 1, 3: 1}, {0: 2, 2: 1, 3: 1}) == {0: {0: 2}, 2: {1: 1}, 3: {3: 1}}
    assert taken_over(OF, {0: 2, 1: 1}, {2: 3}) == {2: {0: 2, 1: 1}}


def test_what_does_not_come_out_even_is_not_done() -> None:
    assert taken_over(OF, {0: 2}, {1: 1, 2: 1}) is None, "the two of one name would be different things"
    assert taken_over(OF, {0: 2}, {1: 1}) is None
    assert taken_over(OF, {0: 2}, {3: 2}) is None, "another kind"


@given(COUNTS, COUNTS)
def test_each_running_engine_is_used_once(running: dict[int, int], wanted: dict[int, int]) -> None:
    found = taken_over(OF, running, wanted)
    if found is None:
        return
    assert of_kind(OF, running) == of_kind(OF, wanted)
    assert {k: sum(mine.values()) for k, mine in found.items()} == wanted
    used: dict[int, int] = defaultdict(int)
    for k, mine in found.items():
        for other, count in mine.items():
            assert OF[other] == OF[k]
            used[other] += count
    assert used == running


@given(
    st.lists(
        st.tuples(st.sampled_from("xy"), st.sampled_from("pq"), st.sampled_from("de"), st.floats(0.1, 9)), min_size=1
    ),
    st.fixed_dictionaries(
        {name: st.dictionaries(st.sampled_from("abc"), st.integers(1, 4), min_size=1) for name in "pqde"}
    ),
)
def test_nothing_is_lost_on_the_way(
    planned: list[tuple[str, str, str, float]], names: dict[str, dict[str, int]]
) -> None:
    # Who prefills and who decodes are never the same running engine.
    names = {name: {f"{'P' if name in 'pq' else 'D'}{k}": n for k, n in mine.items()} for name, mine in names.items()}
    routes = [Route(prefill, decode, bucket, rate, rate / 10, 0.0) for bucket, prefill, decode, rate in planned]
    found = renamed(routes, names)
    assert len({(one.bucket, one.prefill, one.decode) for one in found}) == len(found)
    for bucket in "xy":
        before, after = ([one for one in many if one.bucket == bucket] for many in (routes, found))
        assert sum(one.rate for one in after) == pytest.approx(sum(one.rate for one in before))
        assert sum(one.weight for one in after) == pytest.approx(sum(one.weight for one in before))


def test_an_engine_that_does_all_hands_over_to_itself() -> None:
    found = renamed([Route("b", "b", "x", 3.0, 1.0, 0.0)], {"b": {"one": 1, "two": 2}})
    assert [(r.prefill, r.decode, r.rate) for r in found] == [("one", "one", 1.0), ("two", "two", 2.0)]
