"""A whole handover over real sockets, without an engine: what arrives, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from loopback import AMX, HND, NHD, NZ, SLOTS, VEC, Pair, read

from deeplink.kvconnector.caches.cache import Cache
from deeplink.kvconnector.relayout.plan import Chunk

TOKENS = 333
Make = Callable[..., Pair]


def tables(pair: Pair, tokens: int = TOKENS) -> tuple[list[int], list[int]]:
    """Blocks of either side in no order."""
    rng = np.random.default_rng(3)
    sizes = (side.cache.bound.block_size for side in (pair.producer, pair.consumer))
    ours, theirs = (rng.permutation(24)[: -(-tokens // size)].tolist() for size in sizes)
    return ours, theirs


def hand_over(pair: Pair, *, start: int = 0, stop: int = TOKENS - 1, steps: tuple[int, ...] = (50, 130, 200)) -> None:
    """Early claim, prefill in steps, and every element of the consumer's cache accounted for."""
    ours, theirs = tables(pair)
    before = [layer.copy() for layer in pair.consumer.cache.layers]
    source = [layer.copy() for layer in pair.producer.cache.layers]
    expected = read(pair.producer.cache, ours, 0, TOKENS)
    ticket, text = pair.ticket(30)
    pair.open(ticket, TOKENS)
    pair.load(pair.order(ticket, text, theirs, stop, start=start))
    for computed in (*steps, TOKENS):
        pair.fill(ticket, ours, computed)
    pair.pump(ticket)
    outcome = pair.outcome(30)
    assert outcome.reason is None

    should = [layer.copy() for layer in before]
    Cache(tuple(should), pair.consumer.cache.bound).scatter(expected, 0, theirs, Chunk(start, stop))
    for layer, wanted in zip(pair.consumer.cache.layers, should, strict=True):
        np.testing.assert_array_equal(layer, wanted)
    for layer, wanted in zip(pair.producer.cache.layers, source, strict=True):
        np.testing.assert_array_equal(layer, wanted)
    sent, loaded = pair.settle(ticket, "drained", "loaded")
    assert sent is not None
    assert loaded is not None
    assert sent.digest == loaded.digest != ""
    assert sent.kv_bytes == loaded.kv_bytes >= (stop - start) * pair.consumer.cache.token_bytes
    assert loaded.tokens == stop - start
    assert sent.milliseconds > 0
    assert (sent.side, loaded.side) == ("producer", "consumer")


@pytest.mark.parametrize(
    ("dtype", "ours", "our_block", "theirs", "their_block"),
    [
        ("float32", VEC, 64, VEC, 128),
        ("float16", VEC, 64, SLOTS, 16),
        ("float16", SLOTS, 32, NZ, 128),
        ("float16", NZ, 128, AMX, 32),
        ("float32", NHD, 16, HND, 48),
        ("bfloat16", VEC, 64, AMX, 64),
        ("bfloat16", AMX, 32, VEC, 128),
        ("float16", HND, 128, NHD, 64),
    ],
)
def test_every_byte_arrives(make: Make, dtype: str, ours: str, our_block: int, theirs: str, their_block: int) -> None:
    hand_over(
        make(
            producer={"dtype": dtype, "layout": ours, "block_size": our_block},
            consumer={"dtype": dtype, "layout": theirs, "block_size": their_block},
        )
    )


@pytest.mark.parametrize("chunk", [1, 16 * 1536, 17 * 1536, 64 << 10, 1 << 20, 1 << 30])
def test_any_chunk_size(make: Make, chunk: int) -> None:
    hand_over(make(producer={"chunk": chunk}))


@pytest.mark.parametrize("start", [1, 16, 37, 200, 331])
@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_a_prefix_is_there_already(make: Make, start: int, chunk: int) -> None:
    hand_over(make(producer={"chunk": chunk}), start=start)


@pytest.mark.parametrize("stop", [1, 16, 100, TOKENS])
def test_any_end(pair: Pair, stop: int) -> None:
    hand_over(pair, stop=stop)


@pytest.mark.parametrize(("ours", "theirs"), [(1, 16), (16, 1), (1, 1), (3, 2)])
def test_staging_smaller_than_the_prompt(make: Make, ours: int, theirs: int) -> None:
    """It holds and goes on: 21 tiles pass through room for few."""
    tile = 16 * 1536
    hand_over(
        make(producer={"staging": ours * tile + 64, "chunk": tile}, consumer={"staging": theirs * tile + 64}),
    )


def test_without_verification(make: Make) -> None:
    pair = make(consumer={"verify": False})
    ours, theirs = tables(pair)
    ticket, text = pair.ticket()
    pair.open(ticket, TOKENS)
    pair.fill(ticket, ours, TOKENS)
    pair.load(pair.order(ticket, text, theirs, TOKENS))
    assert pair.outcome().reason is None
    np.testing.assert_array_equal(
        read(pair.consumer.cache, theirs, 0, TOKENS), read(pair.producer.cache, ours, 0, TOKENS)
    )
    sent, loaded = pair.settle(ticket, "drained", "loaded")
    assert sent is not None
    assert loaded is not None
    assert sent.digest == loaded.digest == ""
    assert loaded.digest == ""  # nothing was verified, so nothing is claimed


def test_one_after_the_other_on_the_same_connections(pair: Pair) -> None:
    for _ in range(5):
        hand_over(pair)
    assert len(pair.producer.endpoint._listener._open) == 1
    assert len(pair.consumer.transport._listener._open) == 1


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("at", [0, 332])
def test_an_empty_range_lets_the_producer_go(pair: Pair, early: bool, at: int) -> None:
    ours, _ = tables(pair)
    ticket, text = pair.ticket()
    if early:
        pair.load(pair.order(ticket, text, [], at, start=at))
        pair.open(ticket, TOKENS)
    else:
        pair.open(ticket, TOKENS)
        pair.fill(ticket, ours, TOKENS)
        pair.load(pair.order(ticket, text, [], at, start=at))
    assert pair.outcome().reason is None
    sent, _ = pair.settle(ticket, "drained", "loaded")
    assert sent is not None
    assert (sent.tokens, sent.kv_bytes) == (0, 0)
    pair.fill(ticket, ours, TOKENS)  # late: it changes nothing
    assert pair.producer.endpoint.producer.settled(ticket.handoff)
    pair.settle(ticket, "drained", "loaded")


def test_a_preempted_prefill_goes_on_from_other_blocks(pair: Pair) -> None:
    """What is staged stays good; the same KV is computed again, into another table, from token 0."""
    ours, theirs = tables(pair)
    expected = read(pair.producer.cache, ours, 0, TOKENS)
    producer = pair.producer.endpoint.producer
    ticket, text = pair.ticket(30)
    pair.open(ticket, TOKENS)
    pair.load(pair.order(ticket, text, theirs, TOKENS))
    pair.fill(ticket, ours, 150)
    producer.lose(ticket.handoff)
    for layer in pair.producer.cache.layers:
        layer[:] = 0xDEAD  # another request's
    producer.pump()
    again = [block for block in range(24) if block not in ours][: len(ours)]
    pair.producer.cache.scatter(expected, 0, again, Chunk(0, TOKENS))
    for computed in (40, 100, 151, 300):
        pair.fill(ticket, again, computed)
        if computed == 100:  # and once more
            producer.lose(ticket.handoff)
            producer.pump()
    assert not producer.settled(ticket.handoff)
    pair.fill(ticket, again, TOKENS)
    pair.pump(ticket)
    assert pair.outcome().reason is None
    np.testing.assert_array_equal(read(pair.consumer.cache, theirs, 0, TOKENS), expected)
    pair.settle(ticket, "drained", "loaded")


def test_many_at_once_through_little_staging(make: Make) -> None:
    tile = 16 * 1536
    pair = make(producer={"staging": 8 * tile, "chunk": tile}, consumer={"staging": 3 * tile})
    tokens = 60
    handoffs = []
    for index in range(32):
        # Producer blocks hold 64 tokens, consumer blocks 128; readers may share a block, writers may not.
        ticket, text = pair.ticket(50)
        ours, theirs = [index % 24], [index % 24]
        handoffs.append((ticket, text, ours, theirs))
    rounds = [handoffs[:20], handoffs[20:]]
    for part in rounds:
        for ticket, text, ours, theirs in part:
            pair.open(ticket, tokens)
            pair.load(pair.order(ticket, text, theirs, tokens))
            pair.fill(ticket, ours, tokens)
        for ticket, *_ in part:
            pair.pump(ticket, 40)
        for _ in part:
            assert pair.one(40).reason is None
        for ticket, _, ours, theirs in part:
            np.testing.assert_array_equal(
                read(pair.consumer.cache, theirs, 0, tokens), read(pair.producer.cache, ours, 0, tokens)
            )
            pair.settle(ticket, "drained", "loaded")
    assert pair.producer.endpoint._ledger.ended_by_state == {"drained": 32}
    assert pair.consumer.endpoint._ledger.ended_by_state == {"loaded": 32}
