"""A consumer that goes on from the whole prompt gets the first token of the answer with it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from loopback import Pair, make_pair

from deeplink.errors import Aborted
from deeplink.kvconnector.handoffs.first_token import FirstToken

TOKENS = 100
FIRST = FirstToken(17, -0.5, ((17, -0.5), (3, -1.25)), 64)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = make_pair()
    yield made
    made.close()


def test_it_comes_with_the_end(pair: Pair) -> None:
    ticket, text = pair.ticket()
    pair.open(ticket, TOKENS)
    pair.load(pair.order(ticket, text, range(8), TOKENS, first=True))
    pair.fill(ticket, list(range(8)), TOKENS)
    pair.producer.endpoint.producer.conclude(ticket.handoff, FIRST)
    outcome = pair.outcome()
    assert (outcome.reason, outcome.first) == (None, FIRST)
    pair.settle(ticket, "drained", "loaded")


def test_a_load_does_not_end_before_it_was_sampled(pair: Pair) -> None:
    ticket, text = pair.ticket()
    pair.open(ticket, TOKENS)
    pair.fill(ticket, list(range(8)), TOKENS)
    pair.load(pair.order(ticket, text, range(8), TOKENS, first=True))
    deadline = time.monotonic() + 10
    while pair.producer.endpoint._outgoing.used:  # until all of it has landed
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert pair.consumer.endpoint.consumer.collect() == []
    pair.producer.endpoint.producer.conclude(ticket.handoff, FIRST)
    assert pair.outcome().first == FIRST
    pair.settle(ticket, "drained", "loaded")


def test_who_did_not_ask_does_not_wait(pair: Pair) -> None:
    ticket, text = pair.ticket()
    pair.open(ticket, TOKENS)
    pair.load(pair.order(ticket, text, range(8), TOKENS))
    pair.fill(ticket, list(range(8)), TOKENS)
    outcome = pair.outcome()
    assert (outcome.reason, outcome.first) == (None, None)
    pair.settle(ticket, "drained", "loaded")


def test_one_that_never_comes_is_waited_for_until_the_deadline(pair: Pair) -> None:
    ticket, text = pair.ticket(0.5)
    pair.open(ticket, TOKENS)
    pair.fill(ticket, list(range(8)), TOKENS)
    pair.load(pair.order(ticket, text, range(8), TOKENS, first=True))
    outcome = pair.outcome()
    assert outcome.reason is not None
    assert outcome.reason.code == "deadline_exceeded"
    assert outcome.first is None
    pair.settle(ticket, "expired", "failed")


@pytest.mark.parametrize("who", ["producer", "consumer"])
def test_giving_up_while_it_is_waited_for(pair: Pair, who: str) -> None:
    ticket, text = pair.ticket()
    pair.open(ticket, TOKENS)
    pair.fill(ticket, list(range(8)), TOKENS)
    pair.load(pair.order(ticket, text, range(8), TOKENS, first=True))
    deadline = time.monotonic() + 10
    while pair.producer.endpoint._outgoing.used:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    if who == "producer":
        pair.producer.endpoint.producer.abort(ticket.handoff)
    else:
        pair.consumer.endpoint.consumer.cancel(ticket.handoff)
    outcome = pair.outcome()
    assert outcome.reason is not None
    assert outcome.reason.code == Aborted.code
    pair.settle(ticket, "aborted", "failed")


def test_a_prompt_that_is_all_there_still_needs_it(pair: Pair) -> None:
    ticket, text = pair.ticket()
    pair.open(ticket, TOKENS)
    pair.fill(ticket, list(range(8)), TOKENS)
    pair.load(pair.order(ticket, text, range(8), TOKENS, start=TOKENS, first=True))
    pair.producer.endpoint.producer.conclude(ticket.handoff, FIRST)
    assert pair.outcome().first == FIRST
    pair.settle(ticket, "drained", "loaded")
