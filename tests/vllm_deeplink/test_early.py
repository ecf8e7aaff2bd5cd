"""When a claim that comes before its cache may have blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stages import Stages

from deeplink.kvconnector.handoffs.handoff import BEGUN, COMPLETE, NOT_BEGUN
from deeplink.kvconnector.handoffs.ticket import Ticket
from vllm_deeplink.early import EarlyClaims

UNTIL = 0.0
LONGEST = 160


def ticket(name: str) -> Ticket:
    return Ticket(name, "p", "c", ("127.0.0.1:1",), 1000)


class Engine:
    def __init__(self, blocks: int = 40, sizes: tuple[int, ...] = (16,), longest: int = LONGEST) -> None:
        self.stages = Stages()
        self.claims = EarlyClaims(self.stages, lambda: blocks, sizes, longest)

    def due(self, name: str, tokens: int, stage: int) -> bool:
        self.stages.stages[name] = stage
        return self.claims.due(name, ticket(name), UNTIL, tokens)


def test_not_before_something_is_there() -> None:
    engine = Engine()
    assert not engine.due("a", 100, NOT_BEGUN)
    assert engine.claims.held == 0
    assert engine.due("a", 100, BEGUN)
    assert engine.claims.held == 7
    assert engine.stages.forgotten == ["a"]
    assert engine.due("a", 100, NOT_BEGUN)  # it stays due
    assert engine.claims.held == 7


def test_no_more_than_half_of_the_cache() -> None:
    engine = Engine()
    assert engine.claims.bound == 20
    assert engine.due("a", 160, BEGUN)
    assert engine.due("b", 160, BEGUN)
    assert not engine.due("c", 1, BEGUN)
    engine.claims.over("a")
    assert engine.due("c", 1, BEGUN)
    assert engine.claims.held == 11


def test_the_longest_request_fits_in_beside_them() -> None:
    engine = Engine(blocks=12)
    assert engine.claims.bound == 2
    assert engine.due("a", 32, BEGUN)
    assert not engine.due("b", 16, BEGUN)


def test_a_cache_for_one_request_takes_no_early_claims() -> None:
    engine = Engine(blocks=9)  # less than the longest needs, as a test may force upon vLLM
    assert engine.claims.bound == 0
    assert not engine.due("a", 1, BEGUN)
    assert engine.due("a", 1, COMPLETE)


def test_what_is_complete_passes_those_that_are_put_off() -> None:
    engine = Engine()
    assert engine.due("a", 320, BEGUN)
    assert not engine.due("b", 160, BEGUN)
    assert engine.due("c", 160, COMPLETE)
    assert engine.due("b", 160, COMPLETE)
    assert engine.claims.held == 20


def test_every_cache_group_counts() -> None:
    engine = Engine(blocks=40, sizes=(16, 32, 32), longest=32)
    assert engine.due("a", 33, BEGUN)
    assert engine.claims.held == 3 + 2 + 2


def test_one_that_is_over_is_looked_for_no_longer() -> None:
    engine = Engine()
    engine.due("a", 100, NOT_BEGUN)
    engine.claims.over("a", ticket("a"))
    assert engine.stages.forgotten == ["a"]
    engine.claims.over("never heard of")


CLAIM = st.tuples(st.sampled_from("abcdef"), st.integers(1, 400), st.sampled_from((NOT_BEGUN, BEGUN, COMPLETE)))


@given(st.lists(st.one_of(CLAIM, st.sampled_from("abcdef")), max_size=40), st.integers(1, 200), st.integers(1, 400))
def test_whatever_comes_the_longest_request_fits(
    events: list[tuple[str, int, int] | str], blocks: int, longest: int
) -> None:
    """And a claim whose prefill is complete is never put off."""
    engine = Engine(blocks, (16,), longest)
    for event in events:
        if isinstance(event, str):
            engine.claims.over(event)
        else:
            due = engine.due(*event)
            assert due or event[2] < COMPLETE
        assert engine.claims.held <= max(0, blocks // 2)
        assert engine.claims.held == 0 or blocks - engine.claims.held >= -(-longest // 16)


@pytest.mark.parametrize("stage", [NOT_BEGUN, BEGUN])
def test_nothing_is_held_in_an_empty_cache(stage: int) -> None:
    assert not Engine(blocks=0).due("a", 1, stage)
