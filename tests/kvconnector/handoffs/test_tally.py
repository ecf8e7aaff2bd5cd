"""Counts between two looks, and of several looks together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deeplink.kvconnector.handoffs.tally import Tally, added, since

kinds = st.tuples(st.sampled_from(["producer", "consumer"]), st.sampled_from(["drained", "failed"]), st.just(""))
ends = st.lists(st.tuples(kinds, st.integers(0, 100), st.integers(0, 10**12), st.integers(0, 200)), max_size=20)
End = tuple[tuple[str, str, str], int, int, int]


def counted(ended: list[End]) -> list[Tally]:
    found: dict[tuple[str, str, str], Tally] = {}
    for kind, tokens, kv_bytes, seconds in ended:
        # Whole seconds, so that sums do not depend on their order.
        found.setdefault(kind, Tally(*kind)).add(tokens, kv_bytes, 1, float(seconds), float(tokens), kv_bytes // 2)
    return list(found.values())


def by_kind(tallies: list[Tally]) -> dict[tuple[str, str, str], Tally]:
    return {tally.kind: tally for tally in tallies}


@given(ends, ends)
def test_since(first: list[End], second: list[End]) -> None:
    assert by_kind(since(counted(first), counted(first + second))) == by_kind(counted(second))
    assert since(counted(first), counted(first)) == []


@given(ends, ends)
def test_added(first: list[End], second: list[End]) -> None:
    assert by_kind(added(counted(first), counted(second))) == by_kind(counted(first + second))
