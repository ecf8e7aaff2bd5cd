"""Who may hand over to whom: every field that matters, refused by its name with both values and a remedy."""

from __future__ import annotations

import msgspec
import pytest
from loopback import AMX, HND, NHD, NZ, SLOTS, VEC, make_group
from refused import DECODE, PREFILL, REFUSED, model

from deeplink.errors import Refused
from deeplink.kvconnector.contracts.contract import Contract, Scales, local_address
from deeplink.kvconnector.contracts.negotiate import Agreement, Refusal, negotiate

replace = msgspec.structs.replace


@pytest.mark.parametrize("field", REFUSED)
def test_a_field_that_differs_is_named(field: str) -> None:
    consumer, ours, theirs = REFUSED[field]
    result = negotiate(PREFILL, consumer)
    assert isinstance(result, Refusal)
    assert (result.field, result.ours, result.theirs) == (field, ours, theirs)
    assert result.remedy


ONE_WAY = {"groups[0].dtype", "ranks"}
"""float32 holds what bfloat16 does, and an engine may have more than the other wants."""


@pytest.mark.parametrize("field", [field for field in REFUSED if field not in ONE_WAY])
def test_the_other_way_round_it_is_refused_too(field: str) -> None:
    consumer = REFUSED[field][0]
    result = negotiate(replace(consumer, role="both"), replace(PREFILL, role="both"))
    assert isinstance(result, Refusal)
    assert result.field == field
    assert (result.ours, result.theirs) == (REFUSED[field][2], REFUSED[field][1])


def test_the_table_has_every_field_that_is_compared() -> None:
    assert {f"model.{name}" for name in PREFILL.model.__struct_fields__} <= set(REFUSED)
    free = {"block_size"}  # re-blocking is what kvconnector does; the layout's text may differ as well
    assert {f"groups[0].{name}" for name in PREFILL.groups[0].__struct_fields__ if name not in free} <= set(REFUSED)


@pytest.mark.parametrize("ours", [VEC, AMX, NHD, HND, SLOTS, NZ])
@pytest.mark.parametrize("theirs", [VEC, AMX, NHD, HND, SLOTS, NZ])
@pytest.mark.parametrize("block_size", [16, 48, 128])
def test_layout_and_block_size_may_differ(ours: str, theirs: str, block_size: int) -> None:
    producer = replace(PREFILL, groups=(make_group(ours, 64),))
    consumer = replace(DECODE, groups=(make_group(theirs, block_size),))
    result = negotiate(producer, consumer)
    assert result == Agreement(exact=True, transport="tcp", wire=("float32",))
    assert str(result) == "exact over tcp"


def both(**changes: object) -> tuple[Contract, Contract]:
    ours, theirs = (replace(side.groups[0], heads=1, **changes) for side in (PREFILL, DECODE))
    return replace(PREFILL, groups=(ours,)), replace(DECODE, groups=(theirs,))


def test_one_vector_a_token_is_not_k_and_v() -> None:
    producer, consumer = both(layout="block token dim", head_dim=576)
    assert isinstance(negotiate(producer, consumer), Agreement)
    pairs = replace(consumer, groups=(replace(consumer.groups[0], layout=NHD),))
    result = negotiate(producer, pairs)
    assert isinstance(result, Refusal)
    assert (result.field, result.ours, result.theirs) == ("groups[0].layout", "block token dim", NHD)
    assert "one vector a token" in result.remedy
    parts = replace(consumer, groups=(replace(consumer.groups[0], layout="dim 512+64 | block token dim"),))
    assert isinstance(negotiate(producer, parts), Agreement)


def test_records_are_whole_and_of_one_kind() -> None:
    records = both(layout="block token dim", dtype="uint8[fp8_ds_mla]", head_dim=656)
    assert isinstance(negotiate(*records), Agreement)
    result = negotiate(*both(layout="block token dim", dtype="uint8[fp8_ds_mla]", head_dim=576))
    assert isinstance(result, Refusal)
    assert (result.field, result.remedy) == ("groups[0].head_dim", "a record of uint8[fp8_ds_mla] has 656 bytes")
    result = negotiate(*both(layout="block token dim", dtype="uint8[something_else]", head_dim=656))
    assert isinstance(result, Refusal)
    assert result.field == "groups[0].dtype"


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "int8"])
def test_a_type_whose_scales_the_contract_does_not_state_is_refused(dtype: str) -> None:
    result = negotiate(*both(layout=NHD, dtype=dtype))
    assert isinstance(result, Refusal)
    assert result.field == "groups[0].scales"


@pytest.mark.parametrize(
    ("dtype", "scales"),
    [
        ("bfloat16", Scales("tensor", (1.0,) * 6)),
        ("float8_e4m3fn", Scales("tensor", (1.0,) * 5)),
        ("float8_e4m3fn", Scales("tensor", (1.0,) * 5 + (0.0,))),
        ("float8_e4m3fn", Scales("tensor", (1.0,) * 5 + (float("nan"),))),
        ("float8_e4m3fn", Scales("token-head", (), "block token head kv dim")),
        ("int8", Scales("tensor", (1.0,) * 6)),
        ("int8", Scales("token-head", (), "block token head kv dim", "float16")),
        ("int8", Scales("group-64", (), "block token head kv dim")),
    ],
)
def test_scales_that_do_not_go_with_the_type_are_refused(dtype: str, scales: Scales) -> None:
    result = negotiate(*both(layout=NHD, dtype=dtype, scales=scales))
    assert isinstance(result, Refusal)
    assert result.field == "groups[0].scales"
    assert result.remedy


@pytest.mark.parametrize(
    "change", [{"engine": "sglang"}, {"engine_version": "9"}, {"chip": "ascend-910"}, {"casts": ("bf16->fp16",)}]
)
def test_what_is_only_read_by_people_may_differ(change: dict[str, object]) -> None:
    assert isinstance(negotiate(PREFILL, replace(DECODE, **change)), Agreement)


@pytest.mark.parametrize(
    ("producer", "consumer", "ok"),
    [
        ("prefill", "decode", True),
        ("both", "decode", True),
        ("prefill", "both", True),
        ("both", "both", True),
        ("decode", "decode", False),
        ("prefill", "prefill", False),
        ("decode", "prefill", False),
        ("neither", "decode", False),
        ("prefill", "", False),
    ],
)
def test_roles(producer: str, consumer: str, ok: bool) -> None:
    result = negotiate(replace(PREFILL, role=producer), replace(DECODE, role=consumer))
    assert isinstance(result, Agreement) is ok
    if isinstance(result, Refusal):
        assert (result.field, result.ours, result.theirs) == ("role", producer, consumer)


def test_an_engine_cannot_hand_over_to_itself() -> None:
    same = replace(PREFILL, role="both")
    result = negotiate(same, same)
    assert isinstance(result, Refusal)
    assert result.field == "epoch"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"dtype": "fp8_e4m3"}, "groups[0].dtype"),
        ({"layout": "(" * 4000}, "groups[0].layout"),
        ({"layout": "block head token/7 token%7 kv dim"}, "groups[0].layout"),
    ],
)
def test_what_this_release_cannot_move_is_refused_even_when_equal(change: dict[str, object], field: str) -> None:
    both = (replace(PREFILL.groups[0], **change),)
    result = negotiate(replace(PREFILL, groups=both), replace(DECODE, groups=both))
    assert isinstance(result, Refusal)
    assert result.field == field


def test_a_rank_that_does_not_state_its_heads_for_each_group() -> None:
    result = negotiate(replace(PREFILL, ranks=(replace(PREFILL.ranks[0], heads=((0, 2),) * 2),)), DECODE)
    assert isinstance(result, Refusal)
    assert result.field == "ranks"


def test_the_producers_order_of_transports_counts() -> None:
    producer = replace(PREFILL, ranks=(replace(PREFILL.ranks[0], transports={"a": "", "b": "", "c": ""}),))
    consumer = replace(DECODE, ranks=(replace(DECODE.ranks[0], transports={"c": "", "b": ""}),))
    assert negotiate(producer, consumer) == Agreement(exact=True, transport="b", wire=("float32",))


HERE, THERE = local_address("host.1", "a"), local_address("host.2", "b")


def over(contract: Contract, **transports: str) -> Contract:
    return replace(contract, ranks=(replace(contract.ranks[0], transports=transports),))


@pytest.mark.parametrize(
    ("ours", "theirs", "agreed"),
    [
        ({"shm": HERE, "tcp": "a:1"}, {"shm": HERE, "tcp": "b:1"}, "shm"),
        ({"shm": HERE, "tcp": "a:1"}, {"tcp": "b:1", "shm": HERE}, "shm"),
        ({"shm": HERE, "tcp": "a:1"}, {"shm": THERE, "tcp": "b:1"}, "tcp"),
        ({"shm": HERE, "tcp": "a:1"}, {"shm": "anywhere", "tcp": "b:1"}, "tcp"),
        ({"shm": HERE, "tcp": "a:1"}, {"tcp": "b:1"}, "tcp"),
    ],
)
def test_only_a_transport_that_reaches_is_agreed(ours: dict[str, str], theirs: dict[str, str], agreed: str) -> None:
    assert negotiate(over(PREFILL, **ours), over(DECODE, **theirs)) == Agreement(
        exact=True, transport=agreed, wire=("float32",)
    )


def test_transports_that_do_not_reach_say_where_they_are() -> None:
    result = negotiate(over(PREFILL, shm=HERE), over(DECODE, shm=THERE, rdma="x"))
    assert isinstance(result, Refusal)
    assert (result.field, result.ours, result.theirs) == (
        "transports",
        "shm within host.1",
        "shm within host.2, rdma",
    )


def test_a_refusal_as_an_error_says_everything() -> None:
    result = negotiate(PREFILL, model(weights="other"))
    assert isinstance(result, Refusal)
    error = result.error("engine a", "engine b")
    assert isinstance(error, Refused)
    for part in ("engine a", "engine b", "model.weights", "ours w", "theirs other", "same checkpoint"):
        assert part in str(error)
