"""How far a prefill is, as its decode engine hears of it before it claims."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
from loopback import DIM, HEADS, LAYERS, SECRET, Pair, make_pair

from deeplink.errors import PeerGone
from deeplink.kvconnector.handoffs import channel as ch
from deeplink.kvconnector.handoffs.handoff import BEGUN, COMPLETE, NOT_BEGUN
from deeplink.kvconnector.handoffs.ticket import Ticket
from deeplink.kvconnector.handoffs.watching import Watching

TOKENS = 100
TABLE = list(range(8))


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = make_pair()
    yield made
    made.close()


@pytest.fixture
def watching() -> Iterator[Watching]:
    made = Watching(SECRET)
    yield made
    made.close()


def soon(watching: Watching, ticket: Ticket, stage: int, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while (found := watching.stage(ticket, time.monotonic() + 60)) != stage:
        assert time.monotonic() < end, f"stage {found}, not {stage}"
        time.sleep(0.002)


def unread(pair: Pair, ticket: Ticket) -> int:
    producer = pair.producer.endpoint.producer
    return producer.stages([ticket.handoff], [-1])[0]


def test_through_all_of_a_prefill(pair: Pair, watching: Watching) -> None:
    ticket, text = pair.ticket()
    soon(watching, ticket, NOT_BEGUN)
    pair.open(ticket, TOKENS)
    assert unread(pair, ticket) == NOT_BEGUN  # opened, and nothing to fetch yet
    pair.fill(ticket, TABLE, 48)
    soon(watching, ticket, BEGUN)
    pair.fill(ticket, TABLE, TOKENS)
    soon(watching, ticket, COMPLETE)
    pair.load(pair.order(ticket, text, TABLE, TOKENS))
    assert pair.outcome().reason is None
    assert unread(pair, ticket) == COMPLETE  # drained


def test_a_prefill_for_which_staging_has_no_room_is_complete_all_the_same(watching: Watching) -> None:
    """Nobody would claim it otherwise, and so make room."""
    tile = 16 * LAYERS * 2 * HEADS * DIM * 4
    pair = make_pair(producer={"staging": 2 * tile, "chunk": tile})
    ticket, text = pair.ticket()
    pair.open(ticket, TOKENS)
    pair.fill(ticket, TABLE, 96)
    soon(watching, ticket, BEGUN)
    pair.fill(ticket, TABLE, TOKENS)
    assert not pair.producer.endpoint.producer.settled(ticket.handoff)
    soon(watching, ticket, COMPLETE)
    pair.load(pair.order(ticket, text, TABLE, TOKENS))
    pair.pump(ticket)
    assert pair.outcome().reason is None
    pair.close()


def test_a_prefill_that_was_given_up_is_waited_for_no_longer(pair: Pair, watching: Watching) -> None:
    ticket, _ = pair.ticket()
    pair.open(ticket, TOKENS)
    soon(watching, ticket, NOT_BEGUN)
    pair.producer.endpoint.producer.abort(ticket.handoff)
    soon(watching, ticket, COMPLETE)


def test_many_at_one_producer(pair: Pair, watching: Watching) -> None:
    """More than fit into one message, each with a stage of its own."""
    tickets = [pair.ticket()[0] for _ in range(ch.MAX_WATCHED + 5)]
    for ticket in tickets:
        assert watching.stage(ticket, time.monotonic() + 60) == NOT_BEGUN
    for ticket in (tickets[0], tickets[-1]):
        pair.open(ticket, TOKENS)
        pair.fill(ticket, TABLE, 48)
        soon(watching, ticket, BEGUN)
    assert watching.stage(tickets[1], time.monotonic() + 60) == NOT_BEGUN


def test_one_that_comes_when_the_others_are_complete(pair: Pair, watching: Watching) -> None:
    first, _ = pair.ticket()
    pair.open(first, TOKENS)
    pair.fill(first, TABLE, TOKENS)
    soon(watching, first, COMPLETE)
    second, _ = pair.ticket()
    soon(watching, second, NOT_BEGUN)
    pair.open(second, TOKENS)
    pair.fill(second, TABLE, 48)
    soon(watching, second, BEGUN)
    assert watching.stage(first, time.monotonic() + 60) == COMPLETE


def test_at_its_deadline_a_claim_is_due(pair: Pair, watching: Watching) -> None:
    ticket, _ = pair.ticket()
    assert watching.stage(ticket, time.monotonic() - 1) == COMPLETE


def test_a_producer_that_is_gone_makes_claims_due(watching: Watching) -> None:
    pair = make_pair()
    ticket, _ = pair.ticket()
    soon(watching, ticket, NOT_BEGUN)
    pair.close()
    soon(watching, ticket, COMPLETE)
    other = Ticket("another", "p", "c", ticket.channels, 1000)
    soon(watching, other, COMPLETE)  # nothing listens there any more


def test_a_producer_that_is_silent_is_asked_until_the_deadline(watching: Watching) -> None:
    """It may be frozen; what was reserved for it then would be lost to all others."""
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        ticket = Ticket("x", "p", "c", (f"127.0.0.1:{frozen.getsockname()[1]}",), 1000)
        end = time.monotonic() + 2.6  # longer than one try
        while time.monotonic() < end:
            assert watching.stage(ticket, time.monotonic() + 60) == NOT_BEGUN
            time.sleep(0.05)
        assert watching.stage(ticket, time.monotonic()) == COMPLETE


def test_a_producer_with_another_secret_makes_claims_due(pair: Pair) -> None:
    watching = Watching(b"another secret, of 32 characters")
    ticket, _ = pair.ticket()
    soon(watching, ticket, COMPLETE)
    watching.close()


def test_what_is_forgotten_is_not_asked_for(pair: Pair, watching: Watching) -> None:
    ticket, _ = pair.ticket()
    soon(watching, ticket, NOT_BEGUN)
    watching.forget(ticket)
    watching.forget(ticket)
    assert watching._sources == {}
    soon(watching, ticket, NOT_BEGUN)  # from the beginning
    pair.open(ticket, TOKENS)
    pair.fill(ticket, TABLE, 48)
    soon(watching, ticket, BEGUN)


def test_a_watcher_that_says_something_else(pair: Pair) -> None:
    """It is told off, and the producer goes on."""
    (address,) = pair.ticket()[0].channels
    deadline = time.monotonic() + 10
    channel = ch.Channel.connect(address, SECRET, deadline)
    channel.send(ch.Watch(("x",), (0,)), deadline)
    assert channel.receive(deadline) == ch.Watched((NOT_BEGUN,))
    channel.send(ch.Sent(0), deadline)
    with pytest.raises(PeerGone):
        channel.receive(deadline)
    channel.close()
    pair.hand_over(TOKENS, TABLE, TABLE)


def test_unequal_lists_are_answered_for_what_is_asked(pair: Pair) -> None:
    (address,) = pair.ticket()[0].channels
    deadline = time.monotonic() + 10
    channel = ch.Channel.connect(address, SECRET, deadline)
    channel.send(ch.Watch(("x", "y", "z"), (0,)), deadline)
    assert channel.receive(deadline) == ch.Watched((NOT_BEGUN,) * 3)
    channel.close()
