"""Every (layer, head) of every consumer rank comes from exactly one source, whatever the parallel sizes."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loopback import NHD
from world import Shape

from deeplink.kvconnector.contracts.contract import CacheGroup
from deeplink.kvconnector.contracts.shares import Needs, held, ranks, takes

SIZES = (1, 2, 4, 8)


def groups(heads: int, layers: int) -> tuple[CacheGroup, ...]:
    return (CacheGroup("full", tuple(range(layers)), heads, 16, "float32", 16, NHD),)


@given(
    heads=st.sampled_from(SIZES),
    layers=st.integers(1, 9),
    sizes=st.tuples(*[st.sampled_from(SIZES)] * 2, st.integers(1, 4), st.integers(1, 4)),
    cut=st.integers(1, 9),
)
def test_each_layer_and_head_is_taken_once(heads: int, layers: int, sizes: tuple[int, ...], cut: int) -> None:
    """The consumer keeps its layers in one group, the producer in two."""
    ours_tp, theirs_tp, ours_pp, theirs_pp = sizes
    (whole,) = groups(heads, layers)
    halves = (whole.layers[: min(cut, layers)], whole.layers[min(cut, layers) :])
    producer = Shape(
        tuple(msgspec.structs.replace(whole, layers=half) for half in halves if half), ours_tp, min(ours_pp, layers)
    )
    consumer = Shape((whole,), theirs_tp, min(theirs_pp, layers))
    a, b = producer.contract("prefill", "a"), consumer.contract("decode", "b")
    taken, missing = takes(a, b)
    assert missing == ""
    for rank, sources in zip(b.ranks, taken, strict=True):
        needs, seen = Needs(held(b.groups, rank)), Counter[tuple[int, int]]()
        for source in sources:
            shares = needs.take(held(a.groups, a.ranks[source]))
            assert shares, "a source that gives nothing is not asked"
            for share in shares:
                group = a.groups[share.ours]
                assert set(share.layers) <= set(group.layers)
                seen.update((layer, head) for layer in share.layers for head in range(*share.heads))
        first, last = rank.heads[0]
        assert seen == Counter((layer, head) for layer in range(*rank.layers) for head in range(first, last)), (
            "each once, and no other"
        )


def test_copies_are_read_evenly() -> None:
    """Two heads on eight ranks are four copies of each; eight consumers take from all eight."""
    a, b = (Shape(groups(2, 3), 8).contract(role, role) for role in ("prefill", "decode"))
    taken, _ = takes(a, b)
    assert taken == tuple((rank,) for rank in range(8))


def test_what_no_rank_has_is_named() -> None:
    a = Shape(groups(4, 3), 2).contract("prefill", "a")
    one = msgspec.structs.replace(a, ranks=a.ranks[:1])
    _, missing = takes(one, Shape(groups(4, 3)).contract("decode", "b"))
    assert missing == "heads [2, 4) of layer 0 in groups[0]"


@pytest.mark.parametrize("dp", [0, 1])
def test_each_replica_is_an_engine_of_its_own(dp: int) -> None:
    shape = Shape(groups(4, 2), 2)
    a = shape.contract("prefill", "a")
    a = msgspec.structs.replace(a, ranks=(*shape.ranks(0), *shape.ranks(1)))
    b = Shape(groups(4, 2)).contract("decode", "b")
    assert len(ranks(a, dp)) == 2
    assert takes(a, b, dp, 0) == (((0, 1),), "")
