"""Contracts that decode and mean nothing, or too much: refused by name, in bounded time and memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loopback import HND, NHD, SECRET, make_contract, make_group

from deeplink.kvconnector.contracts.contract import MAX_BYTES, Contract, Rank, Scales, encode
from deeplink.kvconnector.contracts.negotiate import MOST_WORK, Agreement, Refusal, negotiate
from deeplink.kvconnector.contracts.shares import Needs
from deeplink.kvconnector.handoffs.ticket import issue, mint, verify

replace = msgspec.structs.replace

PREFILL = make_contract("p", "prefill", make_group(NHD, 64), channel="127.0.0.1:1", tcp="127.0.0.1:2")
DECODE = make_contract("d", "decode", make_group(HND, 128), channel="127.0.0.1:3", tcp="127.0.0.1:4")


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Of this thread's own time: the machine may be busy with something else."""
    began = time.thread_time()
    yield
    assert time.thread_time() - began < seconds


def refused(producer: Contract, consumer: Contract, field: str, *, whole: bool = True) -> Refusal:
    result = negotiate(producer, consumer, whole=whole)
    assert isinstance(result, Refusal), result
    assert result.field == field
    return result


def ranks(contract: Contract, count: int, heads: int, layers: tuple[int, int], **changes: object) -> Contract:
    """`count` ranks that each have one head."""
    rank = replace(contract.ranks[0], layers=layers, **changes)
    made = tuple(
        replace(rank, tp=at, heads=((at % heads, at % heads + 1),) * len(contract.groups)) for at in range(count)
    )
    return replace(contract, ranks=made)


def wide(contract: Contract, heads: int, layers: int) -> Contract:
    group = replace(contract.groups[0], heads=heads, layers=tuple(range(layers)))
    return replace(contract, groups=(group,))


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("heads", [(2, 1), (1, 1), (0, 0), (1 << 31, 0)])
def test_heads_that_end_before_they_begin(heads: tuple[int, int], whole: bool) -> None:
    """Of a range turned round, what is left on both sides overlaps: with each rank there were twice as many."""
    wrong = replace(PREFILL, ranks=(replace(PREFILL.ranks[0], heads=(heads,)),) * 200)
    assert "heads" in refused(wrong, DECODE, "ranks").remedy
    wrong = replace(DECODE, ranks=(replace(DECODE.ranks[0], heads=(heads,)),))
    refused(PREFILL, wrong, "ranks", whole=whole)


def test_a_source_with_a_range_turned_round_has_nothing() -> None:
    needs = Needs([((0, 1), (0, 4))])
    for _ in range(64):
        assert needs.take([((0, 1), (3, 1))]) == ()
    assert needs.missing == "heads [0, 4) of layer 0 in groups[0]"
    (share,) = needs.take([((1, 0), (1, 3))])
    assert (share.layers, share.heads) == ((1, 0), (1, 3))
    assert needs.missing == "heads [0, 1), [3, 4) of layer 0 in groups[0]"


def test_the_largest_engines_are_matched_in_seconds() -> None:
    """1024 ranks on either side and 4096 layers; a step for each rank, layer and layer would take hours."""
    layers = 4096
    producer = ranks(wide(PREFILL, 1024, layers), 1024, 1024, (0, layers))
    consumer = ranks(wide(DECODE, 1024, layers), 1024, 1024, (0, layers))
    assert len(encode(producer)) < MAX_BYTES
    with within(20):
        result = negotiate(producer, consumer)
    assert isinstance(result, Agreement)
    assert result.takes == tuple((place,) for place in range(1024))


@pytest.mark.parametrize("missing", ["heads", "layers"])
def test_the_largest_engines_that_do_not_fit_are_refused_in_seconds(missing: str) -> None:
    """Each rank holds a little of what every other lacks, so none can be passed over."""
    layers = 1024
    producer = ranks(wide(PREFILL, 1024, layers), 1024, 1, (0, layers))
    producer = replace(
        producer,
        ranks=tuple(
            replace(rank, heads=((at, at + 1),) if missing == "heads" else ((0, 1024),), layers=(at, at + 1))
            for at, rank in enumerate(producer.ranks)
        ),
    )
    consumer = wide(DECODE, 1024, layers)
    consumer = replace(
        consumer,
        ranks=tuple(
            replace(consumer.ranks[0], tp=at, heads=((0, 1024),), layers=(0, layers + (missing == "layers")))
            for at in range(1024)
        ),
    )
    with within(30):
        result = negotiate(producer, consumer)
    assert isinstance(result, Agreement) == (missing == "layers")


def test_more_ranks_and_groups_than_are_matched_are_refused_by_name() -> None:
    def split(contract: Contract) -> Contract:
        (group,) = contract.groups
        groups = tuple(replace(group, layers=(layer,)) for layer in range(8))
        return ranks(replace(contract, groups=groups), 512, 2, (0, 8))

    producer, consumer = split(PREFILL), split(DECODE)
    assert MOST_WORK < 512 * 512 * 8 * 8
    with within(5):
        assert "so many ranks" in refused(producer, consumer, "ranks").remedy


def test_replicas_that_are_all_unlike_are_compared_in_seconds() -> None:
    def unlike(contract: Contract) -> Contract:
        rank = replace(contract.ranks[0], heads=((0, 1024),))
        return replace(
            wide(contract, 1024, 3), ranks=tuple(replace(rank, dp=at, layers=(0, 3 + at)) for at in range(1024))
        )

    with within(20):
        assert isinstance(negotiate(unlike(PREFILL), unlike(DECODE)), Agreement)


def test_the_first_replica_need_not_be_number_0() -> None:
    """It was taken for an engine without ranks, and its ticket for one without channels, which no engine reads."""
    producer, consumer = (replace(one, ranks=(replace(one.ranks[0], dp=1),)) for one in (PREFILL, DECODE))
    agreement = negotiate(producer, consumer)
    assert isinstance(agreement, Agreement)
    assert agreement.takes == ((0,),)
    ticket = issue("handoff", producer, consumer, agreement, 1000)
    assert verify(mint(ticket, SECRET), SECRET) == ticket


def test_one_layer_stated_a_thousand_times_is_refused_at_once() -> None:
    """The search for common layers takes as many steps as the two lists have pairs."""
    group = replace(PREFILL.groups[0], layers=(7,) * 4000)
    many = replace(PREFILL, groups=(group,) * 60)
    other = replace(DECODE, groups=(replace(group, layout=HND),) * 60)
    with within(5):
        refused(many, other, "groups")


def test_many_groups_of_many_layers_are_compared_in_seconds() -> None:
    def split(contract: Contract, step: int) -> Contract:
        (group,) = contract.groups
        groups = tuple(replace(group, layers=tuple(range(at, 60 * 400, step))) for at in range(60))
        return ranks(replace(contract, groups=groups), 1, 1, (0, 60 * 400))

    producer, consumer = split(PREFILL, 60), split(DECODE, 60)
    with within(10):
        assert isinstance(negotiate(producer, consumer), Agreement)


def test_transports_that_are_nowhere_together_are_compared_in_seconds() -> None:
    def scattered(contract: Contract, where: str) -> Contract:
        names = [f"t{at}" for at in range(3)]
        return replace(
            contract,
            ranks=tuple(
                replace(contract.ranks[0], tp=at, transports=dict.fromkeys(names, f"local:{where}{at}/x"))
                for at in range(1024)
            ),
        )

    with within(20):
        refused(scattered(PREFILL, "a"), scattered(DECODE, "b"), "transports")


@pytest.mark.parametrize("values", [(1.0,), (1.0,) * 3, (1.0,) * 6])
@pytest.mark.parametrize("whole", [True, False])
def test_scales_per_token_with_constants_beside_them(values: tuple[float, ...], whole: bool) -> None:
    """They were taken for those of the layers, of which there is another number: a ValueError."""
    scales = Scales("token-head", values, "block token head kv dim")
    group = replace(PREFILL.groups[0], dtype="int8", scales=scales)
    refused(replace(PREFILL, groups=(group,)), DECODE, "groups[0].scales", whole=whole)


counts = st.sampled_from([0, 1, 2, 3, 4, 1 << 31])
sizes = st.sampled_from([1, 2, 3, 16, 1 << 31])
numbers = st.one_of(st.sampled_from([0.0, 1.0, 0.5, 1e308, 1e-308, 5e-324]), st.floats())
any_scales = st.none() | st.builds(
    Scales,
    st.sampled_from(["tensor", "token-head", ""]),
    st.lists(numbers, max_size=6).map(tuple),
    st.sampled_from(["", NHD, "block token head kv dim", "((((", "dim"]),
    st.sampled_from(["float32", "int8", ""]),
)


@st.composite
def contracts(draw: st.DrawFn, like: Contract) -> Contract:
    """Close to a good contract in most fields, so that what is behind the first check is reached."""
    group = like.groups[0]
    groups = tuple(
        replace(
            group,
            kind=draw(st.sampled_from(["full", "full", "sliding", "state", "x"])),
            layers=tuple(draw(st.lists(counts, min_size=1, max_size=4))),
            heads=draw(sizes),
            head_dim=draw(sizes),
            dtype=draw(st.sampled_from(["float32", "bfloat16", "int8", "float8_e4m3fn", "uint8[fp8_ds_mla]", "", "x"])),
            block_size=draw(sizes),
            layout=draw(
                st.sampled_from([NHD, HND, "block token dim", "kv | slot head dim", "dim 1+1 | block token dim"])
            ),
            window=draw(counts),
            scales=draw(any_scales),
        )
        for _ in range(draw(st.integers(1, 3)))
    )
    pairs = st.tuples(counts, counts)
    made = st.builds(
        Rank,
        counts,
        counts,
        st.sampled_from([0, 0, 0, 1]),
        st.lists(pairs, min_size=1, max_size=3).map(tuple),
        pairs,
        st.just("127.0.0.1:1"),
        st.dictionaries(st.sampled_from(["tcp", "shm"]), st.sampled_from(["", "local:a/b", "local:", "local:a"])),
    )
    return replace(like, groups=groups, ranks=tuple(draw(st.lists(made, min_size=1, max_size=3))))


@given(
    producer=contracts(PREFILL) | st.just(PREFILL), consumer=contracts(DECODE) | st.just(DECODE), whole=st.booleans()
)
@settings(max_examples=300, deadline=None)
def test_whatever_two_contracts_say_the_answer_is_an_agreement_or_a_refusal(
    producer: Contract, consumer: Contract, whole: bool
) -> None:
    result = negotiate(producer, consumer, whole=whole)
    assert isinstance(result, (Agreement, Refusal))
