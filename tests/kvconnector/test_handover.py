"""A whole handover over real sockets, without an engine."""

from __future__ import annotations

import numpy as np
import pytest
from loopback import AMX, HND, NHD, VEC, Pair, make_side

from deeplink.kvconnector.cache import Cache
from deeplink.kvconnector.plan import Chunk


def read(cache: Cache, table: list[int], start: int, stop: int) -> np.ndarray:
    wire = np.empty(cache.wire_shape(stop - start), cache.dtype)
    cache.gather(table, Chunk(start, stop), wire)
    return wire


@pytest.mark.parametrize(
    ("dtype", "ours", "our_block", "theirs", "their_block"),
    [
        ("float32", VEC, 64, VEC, 128),
        ("float32", NHD, 16, HND, 48),
        ("bfloat16", VEC, 64, AMX, 64),
        ("bfloat16", AMX, 32, VEC, 128),
        ("float16", HND, 128, NHD, 64),
    ],
)
def test_every_byte_arrives(dtype: str, ours: str, our_block: int, theirs: str, their_block: int) -> None:
    pair = Pair(
        make_side("prefill", ours, our_block, dtype=dtype, seed=1),
        make_side("decode", theirs, their_block, dtype=dtype, seed=2),
    )
    tokens = 333
    table_p = list(np.random.default_rng(3).permutation(24)[: -(-tokens // our_block)])
    table_d = list(np.random.default_rng(4).permutation(24)[: -(-tokens // their_block)])
    before = [layer.copy() for layer in pair.consumer.cache.layers]
    expected = read(pair.producer.cache, table_p, 0, tokens - 1)

    ticket, text = pair.ticket()
    pair.producer.endpoint.producer.open(ticket, b"prompt", tokens)
    pair.consumer.endpoint.consumer.load(pair.order(ticket, text, table_d, tokens - 1))
    for computed in (50, 130, 200, tokens):
        pair.producer.endpoint.producer.fill(ticket.handoff, table_p, computed)
    outcome = pair.outcome()
    assert outcome.reason is None

    np.testing.assert_array_equal(read(pair.consumer.cache, table_d, 0, tokens - 1), expected)
    # Nothing else was touched: putting the old tokens back gives the old cache, bit for bit.
    restored = [layer.copy() for layer in before]
    Cache(tuple(restored), pair.consumer.cache.bound).scatter(expected, 0, table_d, Chunk(0, tokens - 1))
    for layer, should in zip(pair.consumer.cache.layers, restored, strict=True):
        np.testing.assert_array_equal(layer, should)
    ours_record = pair.producer.endpoint._ledger.get(ticket.handoff)
    theirs_record = pair.consumer.endpoint._ledger.get(ticket.handoff)
    pair.quiet()
    ours_record = pair.producer.endpoint._ledger.get(ticket.handoff)
    assert ours_record is not None
    assert theirs_record is not None
    assert (ours_record.state, theirs_record.state) == ("drained", "loaded")
    assert ours_record.digest == theirs_record.digest != ""
    assert theirs_record.tokens == tokens - 1
    for side in (pair.producer, pair.consumer):
        side.endpoint.close()
