"""Several cache groups in one handoff, and casts between unlike element types."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from loopback import HND, NHD, VEC
from world import Engine, Shape, agree, hand_over, read

from deeplink.kvconnector.contracts.contract import CacheGroup, Scales
from deeplink.kvconnector.contracts.negotiate import Refusal, negotiate
from deeplink.kvconnector.handoffs import ticket as tickets
from deeplink.kvconnector.layouts.cast import between
from deeplink.kvconnector.layouts.elements import FORMATS
from deeplink.kvconnector.relayout.convert import storage_dtype
from deeplink.kvconnector.relayout.plan import Chunk

replace = msgspec.structs.replace
Start = Callable[..., Engine]
FULL = CacheGroup("full", (0, 3), 4, 16, "bfloat16", 16, NHD)
SLIDING = CacheGroup("sliding", (1, 2), 4, 16, "bfloat16", 16, NHD, window=40)
STATE = CacheGroup("state", (4,), 1, 384, "float32", 1, "block token dim")
TABLES = [[5, 2, 9, 0, 7, 11, 3]], [[3, 1, 8, 6, 2, 12, 4]]


def both(group: CacheGroup, **changes: object) -> tuple[CacheGroup, CacheGroup]:
    return group, replace(group, layout=HND, block_size=group.block_size if group.kind == "state" else 32, **changes)


def equal(a: Engine, b: Engine, index: int, tables: tuple[list[int], list[int]], start: int, stop: int) -> None:
    got, expected = read(b.held[0], index, tables[1], start, stop), read(a.held[0], index, tables[0], start, stop)
    np.testing.assert_array_equal(got, expected)


def test_full_sliding_and_state_in_one_handoff(start: Start) -> None:
    a = start(Shape((FULL, SLIDING, STATE)), "prefill", 1)
    b = start(Shape((both(FULL)[1], both(SLIDING)[1], STATE)), "decode", 2)
    old = read(b.held[0], 1, [3, 1, 8, 6], 0, 128)
    ours = [[5, 2, 9, 0, 7, 11, 3], [1, 2, 3, 4, 5, 6, 7], [13]]
    theirs = [[3, 1, 8, 6], [3, 1, 8, 6], [4]]
    hand_over(a, b, 101, ours, theirs)
    equal(a, b, 0, (ours[0], theirs[0]), 0, 101)
    equal(a, b, 2, (ours[2], theirs[2]), 0, 1)
    # Token 101 is computed next and sees itself and 39 before it.
    equal(a, b, 1, (ours[1], theirs[1]), 62, 101)
    np.testing.assert_array_equal(read(b.held[0], 1, theirs[1], 0, 62), old[:, :, :, :62])


@pytest.mark.parametrize(("begin", "stop"), [(0, 100), (64, 100), (64, 101), (90, 101), (101, 101)])
def test_a_sliding_window_beside_a_prefix(start: Start, begin: int, stop: int) -> None:
    a = start(Shape((FULL, SLIDING)), "prefill", 1)
    b = start(Shape((both(FULL)[1], both(SLIDING)[1])), "decode", 2)
    ours, theirs = TABLES[0] * 2, TABLES[1] * 2
    hand_over(a, b, 101, ours, theirs, start=begin, stop=stop)
    equal(a, b, 0, (ours[0], theirs[0]), begin, stop)
    equal(a, b, 1, (ours[1], theirs[1]), min(stop, max(begin, stop - 39)), stop)


def test_a_full_cache_fills_a_sliding_one(start: Start) -> None:
    """An engine without hybrid caches keeps everything; the other wants the window of some layers."""
    a = start(Shape((replace(FULL, layers=(0, 1, 2, 3)),)), "prefill", 1)
    b = start(Shape((both(FULL)[1], both(SLIDING)[1])), "decode", 2)
    _, agreement = hand_over(a, b, 101, TABLES[0], TABLES[1] * 2)
    assert agreement.exact
    for index, rows in ((0, [0, 3]), (1, [1, 2])):
        expected = read(a.held[0], 0, TABLES[0][0], 62, 101)[rows]
        np.testing.assert_array_equal(read(b.held[0], index, TABLES[1][0], 62, 101), expected)


def test_a_sliding_cache_does_not_fill_a_full_one() -> None:
    a = Shape((FULL, SLIDING)).contract("prefill", "a")
    result = negotiate(a, Shape((replace(FULL, layers=(0, 1, 2, 3)),)).contract("decode", "b"))
    assert isinstance(result, Refusal)
    assert (result.field, result.ours, result.theirs) == ("groups[1].kind", "sliding", "full")


# -- casts ---------------------------------------------------------------------------------------------------

ROW_SCALES = Scales("token-head", layout="block token head kv dim")


def of(dtype: str, scale: float = 1.0) -> CacheGroup:
    base = CacheGroup("full", (0, 1), 2, 16, dtype, 16, NHD)
    if dtype == "int8":
        return replace(base, scales=ROW_SCALES)
    if dtype.startswith("float8"):
        return replace(base, scales=Scales("tensor", (scale,) * 4))
    return base


def values(engine: Engine, table: list[int], stop: int) -> np.ndarray:
    """What the elements mean."""
    spec = engine.contract.groups[0]
    codes = read(engine.held[0], 0, table, 0, stop)
    if spec.dtype == "int8":
        scales = engine.held[0][0].scales
        assert scales is not None
        wire = np.empty(scales.wire_shape(stop), scales.dtype)
        scales.gather(table, Chunk(0, stop), wire)
        return codes.view(np.int8).astype(np.float64) * wire.view(np.float32)
    constant = spec.scales.values[0] if spec.scales else 1.0
    table_of = (
        np.array([FORMATS[spec.dtype].value(code) for code in range(1 << 8 * codes.itemsize)])
        if (codes.itemsize < 4)
        else None
    )
    return (codes.view(np.float32).astype(np.float64) if table_of is None else table_of[codes]) * constant


TYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "int8")


@pytest.mark.parametrize("source", TYPES)
@pytest.mark.parametrize("target", TYPES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_cast_is_exact_or_within_its_bound_or_refused(start: Start, source: str, target: str, ranks: int) -> None:
    cast = between(source, target)
    assert cast is not None
    consent = (cast.name,)
    a = start(Shape((of(source),), ranks), "prefill", 1, casts=consent)
    theirs = replace(of(target), layout=VEC if target != "int8" else HND, block_size=32)
    b = start(Shape((theirs,)), "decode", 2, casts=consent)
    if source == "int8":
        _small_scales(a)
    if source in ("float8_e5m2",) or target == "int8" or source == "int8":
        _tame(a)
    agreement = agree(a.contract, b.contract)
    assert agreement.exact == cast.exact
    hand_over(a, b, 101, *TABLES)
    for rank, groups in enumerate(a.held):
        first, last = groups[0].heads
        one = Engine(a.shape, a.contract, [groups], [])
        before, after = values(one, TABLES[0][0], 101), values(b, TABLES[1][0], 101)[:, :, first:last]
        error = np.abs(before - after)
        limit = np.maximum(cast.relative * np.abs(before), cast.absolute)
        limit = np.maximum(limit, cast.row * np.abs(before).max(axis=-1, keepdims=True))
        assert (error <= limit).all(), rank
        if cast.exact:
            np.testing.assert_array_equal(before, after)


def _tame(engine: Engine) -> None:
    """Magnitudes that every type holds."""
    for groups in engine.held:
        for array in groups[0].values.layers:
            if groups[0].spec.dtype == "float8_e5m2":
                array[...] = (array & 0x83) | 0x3C
            elif groups[0].spec.dtype == "int8":
                array[array == 0x80] = 0


def _small_scales(engine: Engine) -> None:
    for groups in engine.held:
        assert groups[0].scales is not None
        for array in groups[0].scales.layers:
            array.view(np.float32)[...] = np.abs(array.view(np.float32)) / 64 + 2**-6


@pytest.mark.parametrize("sides", [(), ("a",), ("b",)])
def test_a_lossy_cast_needs_the_consent_of_both(sides: tuple[str, ...]) -> None:
    name = "bfloat16->float16"
    a = Shape((of("bfloat16"),)).contract("prefill", "a", (name,) if "a" in sides else ())
    b = Shape((of("float16"),)).contract("decode", "b", (name,) if "b" in sides else ("*->float32", "garbage"))
    result = negotiate(a, b)
    assert isinstance(result, Refusal)
    assert (result.field, result.ours, result.theirs) == ("groups[0].dtype", "bfloat16", "float16")
    assert 'casts = ["bfloat16->float16"]' in result.remedy


def test_a_lossy_agreement_says_so() -> None:
    a = Shape((of("bfloat16"),)).contract("prefill", "a", ("*->float16",))
    b = Shape((of("float16"),)).contract("decode", "b", ("bfloat16->float16",))
    agreement = agree(a, b)
    assert not agreement.exact
    assert str(agreement).startswith("lossy over tcp (bfloat16->float16: ")


def test_widening_needs_no_consent_and_travels_narrow(start: Start) -> None:
    a = start(Shape((of("bfloat16"),)), "prefill", 1)
    b = start(Shape((of("float32"),)), "decode", 2)
    ticket, agreement = hand_over(a, b, 101, *TABLES)
    assert (agreement.exact, agreement.wire) == (True, ("bfloat16",))
    narrow = a.endpoints[0]._ledger.get(ticket.handoff)
    assert narrow is not None
    assert narrow.kv_bytes == 101 * 2 * 2 * 2 * 16 * 2


def test_narrowing_happens_where_it_saves_the_wire(start: Start) -> None:
    casts = ("float32->bfloat16",)
    a = start(Shape((of("float32"),)), "prefill", 1, casts=casts)
    b = start(Shape((of("bfloat16"),)), "decode", 2, casts=casts)
    _, agreement = hand_over(a, b, 101, *TABLES)
    assert agreement.wire == ("bfloat16",)


@pytest.mark.parametrize("source", ["bfloat16", "float32"])
def test_a_value_beyond_the_targets_range_is_refused_by_its_place(start: Start, source: str) -> None:
    """bf16 -> fp16 is cast by the consumer, fp32 -> fp16 by the producer; nothing wrong is ever written."""
    casts = ("*->float16",)
    a = start(Shape((of(source),)), "prefill", 1, casts=casts)
    b = start(Shape((of("float16"),)), "decode", 2, casts=casts)
    huge = {"bfloat16": 0x7F00, "float32": 0x7F000000}[source]
    wire = read(a.held[0], 0, TABLES[0][0], 0, 101)
    wire[1, 0, 1, 70, 5] = huge
    a.held[0][0].values.scatter(wire, 0, TABLES[0][0], Chunk(0, 101))
    agreement = agree(a.contract, b.contract)
    ticket = tickets.issue(tickets.new_handoff(), a.contract, b.contract, agreement, 30_000)
    a.open(ticket, 101)
    b.load(ticket, TABLES[1], 0, 101)
    a.fill(ticket, TABLES[0], 101)
    (outcome,) = b.ended()
    assert outcome.reason is not None
    assert (outcome.reason.code, outcome.reason.field) == ("cast_refused", "cast")
    assert "layer 1, k, head 1, token 70, dim 5" in outcome.reason.message
    a.quiet()
    b.quiet()
    assert a.states(ticket) == ["failed"]
    assert b.states(ticket) == ["failed"]
    hand_over(a, b, 64, *TABLES)  # the next request, without that token, is served


def test_the_place_of_a_value_is_named_in_a_group_whose_layers_have_gaps(start: Start) -> None:
    casts = ("*->float16",)
    a = start(Shape((FULL, SLIDING)), "prefill", 1, casts=casts)
    narrow = [replace(group, dtype="float16") for group in (FULL, SLIDING)]
    b = start(Shape(tuple(narrow)), "decode", 2, casts=casts)
    wire = read(a.held[0], 0, TABLES[0][0], 0, 101)
    wire[1, 1, 2, 70, 5] = 0x7F00
    a.held[0][0].values.scatter(wire, 0, TABLES[0][0], Chunk(0, 101))
    ticket = tickets.issue(tickets.new_handoff(), a.contract, b.contract, agree(a.contract, b.contract), 30_000)
    a.open(ticket, 101)
    b.load(ticket, TABLES[1] * 2, 0, 101)
    a.fill(ticket, TABLES[0] * 2, 101)
    (outcome,) = b.ended()
    assert outcome.reason is not None
    assert "layer 3, v, head 2, token 70, dim 5" in outcome.reason.message
    a.quiet()
    b.quiet()


@pytest.mark.parametrize(
    ("ours", "theirs", "exact"),
    [(0.5, 0.5, True), (0.5, 0.25, False), (0.3, 0.3, True), (0.3, 0.7, False)],
)
def test_constant_scales(start: Start, ours: float, theirs: float, exact: bool) -> None:
    casts = ("float8_e4m3fn->float8_e4m3fn",)
    a = start(Shape((of("float8_e4m3fn", ours),)), "prefill", 1, casts=casts)
    b = start(Shape((of("float8_e4m3fn", theirs),)), "decode", 2, casts=casts)
    for array in a.held[0][0].values.layers:
        array &= 0xBF  # below 2, so that another scale does not push it out of range
    agreement = agree(a.contract, b.contract)
    assert agreement.exact is exact
    hand_over(a, b, 101, *TABLES)
    before, after = values(a, TABLES[0][0], 101), values(b, TABLES[1][0], 101)
    np.testing.assert_allclose(after, before, rtol=2**-4 + 1e-6, atol=theirs * 2**-9)
    if exact:
        np.testing.assert_array_equal(after, before)


def test_e4m3fn_and_fnuz_are_never_confused(start: Start) -> None:
    """The same byte is worth half in fnuz, so bytes that arrive unchanged would be wrong."""
    casts = ("float8_e4m3fn->float8_e4m3fnuz",)
    a = start(Shape((of("float8_e4m3fn"),)), "prefill", 1, casts=casts)
    b = start(Shape((of("float8_e4m3fnuz"),)), "decode", 2, casts=casts)
    hand_over(a, b, 101, *TABLES)
    before, after = values(a, TABLES[0][0], 101), values(b, TABLES[1][0], 101)
    np.testing.assert_array_equal(before, after)
    assert (read(a.held[0], 0, TABLES[0][0], 0, 101) != read(b.held[0], 0, TABLES[1][0], 0, 101)).any()


def test_opaque_records_are_never_cast() -> None:
    record = CacheGroup("full", (0,), 1, 656, "uint8[fp8_ds_mla]", 64, "block token dim")
    a = Shape((record,)).contract("prefill", "a")
    b = Shape((replace(record, dtype="bfloat16", head_dim=656),)).contract("decode", "b", ("*->bfloat16",))
    result = negotiate(a, b)
    assert isinstance(result, Refusal)
    assert result.field == "groups[0].dtype"
    assert storage_dtype(record.dtype) == np.uint8
