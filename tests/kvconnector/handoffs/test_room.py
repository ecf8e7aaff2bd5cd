"""Staging that is much smaller than what is to be handed over, and decode engines that fetch in any order."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest
from loopback import DIM, HEADS, LAYERS, Pair, make_pair

TILE_BYTES = 16 * LAYERS * 2 * HEADS * DIM * 4
TOKENS = 100
TABLE = list(range(8))


def make(tiles: int, chunk: int = 1) -> Pair:
    """The producer's staging has room for so many tiles of 16 tokens, and a chunk is so many."""
    return make_pair(producer={"staging": tiles * TILE_BYTES, "chunk": chunk * TILE_BYTES})


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = make(4)
    yield made
    made.close()


def used(pair: Pair) -> float:
    return pair.producer.endpoint._outgoing.used / TILE_BYTES


def test_what_nobody_fetches_yet_leaves_room_for_a_chunk(pair: Pair) -> None:
    """Whether its prefill has ended or not; and what is fetched has all that is left."""
    first, text = pair.ticket()
    second, _ = pair.ticket()
    pair.open(second, TOKENS)
    pair.fill(second, TABLE, 96)
    assert used(pair) == 3
    pair.open(first, TOKENS)
    pair.fill(first, TABLE, TOKENS)
    assert used(pair) == 3
    pair.load(pair.order(first, text, TABLE, TOKENS))
    pair.pump(first)
    assert pair.outcome().reason is None
    pair.fill(second, TABLE, TOKENS)
    assert used(pair) == 3
    pair.producer.endpoint.producer.abort(second.handoff)
    pair.quiet()


def test_a_chunk_that_is_most_of_staging() -> None:
    """Smaller ones have to do."""
    pair = make(4, chunk=3)
    waiting, _ = pair.ticket()
    pair.open(waiting, TOKENS)
    pair.fill(waiting, TABLE, 32)
    assert used(pair) == 2
    ticket, text = pair.ticket()
    pair.open(ticket, TOKENS)
    pair.load(pair.order(ticket, text, TABLE, TOKENS))
    pair.fill(ticket, TABLE, TOKENS)
    pair.pump(ticket)
    assert pair.outcome().reason is None
    pair.producer.endpoint.producer.abort(waiting.handoff)
    pair.quiet()
    pair.close()


@pytest.mark.parametrize("order", ["first come", "last come", "any"])
@pytest.mark.parametrize(("tiles", "chunk"), [(2, 1), (4, 2), (5, 3), (3, 3)])
def test_none_waits_for_ever(order: str, tiles: int, chunk: int) -> None:
    """Twelve prefills have ended; the decode engine has blocks for two at a time, and takes them in this order."""
    pair, dice = make(tiles, chunk), random.Random(tiles)
    made = [pair.ticket(seconds=60) for _ in range(12)]
    for ticket, _ in made:
        pair.open(ticket, TOKENS)
        pair.fill(ticket, TABLE, dice.choice((64, TOKENS)))
    for ticket, _ in made:
        pair.fill(ticket, TABLE, TOKENS)
    waiting = {"first come": made, "last come": made[::-1], "any": dice.sample(made, len(made))}[order]
    loading = done = 0
    end = time.monotonic() + 30
    while done < len(made):
        assert time.monotonic() < end, f"{done} of {len(made)} are done"
        while loading < 2 and waiting:
            ticket, text = waiting[0]
            waiting = waiting[1:]
            pair.load(pair.order(ticket, text, TABLE, TOKENS))
            loading += 1
        pair.producer.endpoint.producer.pump()
        for outcome in pair.consumer.endpoint.consumer.collect():
            assert outcome.reason is None
            loading, done = loading - 1, done + 1
        time.sleep(0.001)
    pair.quiet()
    pair.close()
