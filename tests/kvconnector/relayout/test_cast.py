"""Casts: every code of every pair of types against rounding by hand, the stated bounds against the data."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import platform
import threading
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numbers_by_hand import BITS, INFINITE, LARGEST, TYPES, magnitudes, rounded, value

from deeplink.errors import CastRefused, ConfigError, LayoutError, Refused
from deeplink.kvconnector.layouts.cast import Cast, between, parse_consent
from deeplink.kvconnector.layouts.elements import FORMATS, INTEGER
from deeplink.kvconnector.layouts.layout import ELEMENTS
from deeplink.kvconnector.relayout import casting
from deeplink.kvconnector.relayout.casting import BLOCK, apply
from deeplink.kvconnector.relayout.codes import decode, encode
from deeplink.kvconnector.relayout.convert import storage_dtype

Codes = npt.NDArray[Any]

SMALL = [name for name in TYPES if BITS[name] < 32]
PAIRS = [(source, target) for source in TYPES for target in TYPES if source != target]
SMALL_PAIRS = [(source, target) for source, target in PAIRS if source in SMALL]


def known(source: str, target: str, ratio: float = 1.0) -> Cast:
    cast = between(source, target, ratio)
    assert cast is not None
    return cast


def chunk(element: str, codes: Any) -> Codes:
    return np.asarray(codes, storage_dtype(element)).reshape(1, 1, 1, 1, -1)


def cast_codes(source: str, target: str, codes: Any, **scales: float) -> list[int]:
    given = chunk(source, codes)
    out = np.full(given.shape, 0x5A, storage_dtype(target))
    apply(known(source, target), given, out, **scales)
    return [int(code) for code in out.flat]


def is_nan(element: str, code: int) -> bool:
    return math.isnan(value(element, code))


def same(target: str, got: int, want: int) -> bool:
    """NaN may become any NaN."""
    return got == want or (is_nan(target, got) and is_nan(target, want))


def nan_of(target: str) -> int:
    return FORMATS[target].nan


@pytest.mark.parametrize("element", TYPES)
def test_a_format_is_what_is_written_down_by_hand(element: str) -> None:
    of = FORMATS[element]
    assert (of.bits, of.largest) == (BITS[element], LARGEST[element])
    assert bool(of.infinity) == (element in INFINITE)
    assert ELEMENTS[element] * 8 == of.bits
    codes = range(1 << of.bits) if of.bits < 32 else [*range(0, 1 << 32, 65521), *float32_corners()]
    values = decode(np.asarray(codes, storage_dtype(element)), of)
    for code, decoded in zip(codes, values.tolist(), strict=True):
        want = value(element, code)
        for got in (of.value(code), decoded):
            assert got == want or (math.isnan(got) and math.isnan(want)), hex(code)
            assert math.isnan(want) or math.copysign(1, got) == math.copysign(1, want), hex(code)
    assert math.isnan(of.value(of.nan))
    finite = np.isfinite(values)
    np.testing.assert_array_equal(encode(values[finite], of), np.asarray(codes)[finite])


@pytest.mark.parametrize(("source", "target"), SMALL_PAIRS)
def test_every_code_is_rounded_to_nearest_even_or_refused(source: str, target: str) -> None:
    codes = range(1 << BITS[source])
    want = {code: nan_of(target) if is_nan(source, code) else rounded(target, value(source, code)) for code in codes}
    accepted = [code for code in codes if want[code] is not None]
    for code, got in zip(accepted, cast_codes(source, target, accepted), strict=True):
        assert same(target, got, want[code]), hex(code)
    refused = [code for code in codes if want[code] is None]
    beyond = set(refused)
    edge = [code for code in refused if not {code - 1, code + 1} <= beyond]
    for code in {*edge, *refused[:: 1 + len(refused) // 256]}:
        with pytest.raises(CastRefused):
            cast_codes(source, target, [code])


def test_the_notes_of_bf16_to_fp16_are_reproduced() -> None:
    """Of the finite bf16 codes 8704 survive, and 28672 do not fit."""
    finite = [code for code in range(1 << 16) if math.isfinite(value("bfloat16", code))]
    fits = [code for code in finite if rounded("float16", value("bfloat16", code)) is not None]
    out = cast_codes("bfloat16", "float16", fits)
    equal = sum(value("bfloat16", a) == value("float16", b) for a, b in zip(fits, out, strict=True))
    assert len(finite) - len(fits) == 28672
    assert equal == 8704


@pytest.mark.parametrize("ratio", [1.0, 0.5, 2.0, 2.0**-9, 2.0**7, 0.1, 3.7])
@pytest.mark.parametrize(("source", "target"), SMALL_PAIRS + [(name, name) for name in SMALL])
def test_the_bound_holds_for_every_code_and_exact_is_exact(source: str, target: str, ratio: float) -> None:
    cast = known(source, target, ratio)
    of, to = FORMATS[source], FORMATS[target]
    codes = np.arange(1 << of.bits, dtype=storage_dtype(source))
    values = decode(codes, of)
    finite = np.isfinite(values)
    fits = finite & (np.abs(values) * ratio <= to.brim)
    out = np.zeros((1, 1, 1, 1, int(fits.sum())), storage_dtype(target))
    apply(cast, codes[fits].reshape(out.shape), out, source_scale=ratio)
    got, want = decode(out.reshape(-1), to), values[fits] * ratio
    error = np.abs(got - want)
    assert (error <= np.maximum(cast.relative * np.abs(want), cast.absolute)).all()
    assert cast.exact == (bool(fits.sum() == finite.sum()) and not error.any())
    assert (cast.largest == math.inf) == bool((np.abs(values[finite]) * ratio <= to.largest).all())
    assert np.isfinite(got).all()
    assert bool(error.any()) == bool(cast.relative or cast.absolute)
    for part in ("refuses", "error at most"):
        stated = (cast.largest < math.inf or bool(of.infinity and not to.infinity), bool(error.any()))
        assert (part in cast.bound) == stated[part != "refuses"]


@pytest.mark.parametrize(("source", "target"), [(s, t) for s, t in SMALL_PAIRS if s in ("bfloat16", "float16")])
def test_the_bound_is_tight(source: str, target: str) -> None:
    """Within a factor of two, so that it tells an operator something."""
    cast = known(source, target)
    values = decode(np.arange(1 << 16, dtype=np.uint16), FORMATS[source])
    fits = np.isfinite(values) & (np.abs(values) <= FORMATS[target].brim)
    error = np.abs(
        decode(encode(values[fits], FORMATS[target]).astype(storage_dtype(target)), FORMATS[target]) - values[fits]
    )
    magnitude = np.abs(values[fits])
    small = cast.relative * magnitude <= cast.absolute
    if cast.absolute:
        assert error[small].max() >= cast.absolute / 2
    if cast.relative:
        assert (error[~small] / magnitude[~small]).max() >= cast.relative / 2


# float32 has too many codes to try them all: corners, a search by hypothesis, and many at random.


def float32_code(x: float) -> int:
    code = rounded("float32", x)
    assert code is not None
    return code


def float32_corners() -> list[int]:
    """Every value, midpoint and neighbour that decides a rounding, for each target; and what is special."""
    found = {0, 1, 2, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F7F7FFF, 0x7F7F8000, 0x7F7F8001, 0x7F800000}
    found |= {0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x7F80FFFF, 0x7F810000, 0x7FBFFFFF}
    for target in SMALL:
        steps = magnitudes(target)
        for index in {
            *range(min(40, len(steps) - 1)),
            *range(0, len(steps) - 1, 127),
            *range(len(steps) - 9, len(steps) - 1),
        }:
            middle = float32_code((steps[index] + steps[index + 1]) / 2)
            for code in (float32_code(steps[index]), middle):
                found |= {max(code - 1, 0), code, code + 1}
    return sorted(code | sign for code in found for sign in (0, 1 << 31))


@pytest.mark.parametrize("target", SMALL)
def test_float32_at_every_corner(target: str) -> None:
    check_float32(target, float32_corners())


@pytest.mark.parametrize("target", SMALL)
@given(data=st.data())
def test_float32_anywhere(target: str, data: st.DataObject) -> None:
    code = st.integers(0, (1 << 32) - 1)
    near = st.floats(-2 * LARGEST[target], 2 * LARGEST[target], width=64).map(lambda x: rounded("float32", x) or 0)
    check_float32(target, data.draw(st.lists(code | near, min_size=1, max_size=40)))


def check_float32(target: str, codes: list[int]) -> None:
    want = [nan_of(target) if is_nan("float32", code) else rounded(target, value("float32", code)) for code in codes]
    accepted = [(code, result) for code, result in zip(codes, want, strict=True) if result is not None]
    out = cast_codes("float32", target, [code for code, _ in accepted])
    for (code, result), got in zip(accepted, out, strict=True):
        assert same(target, got, result), hex(code)
    refused = [place for place, result in enumerate(want) if result is None]
    if refused:
        with pytest.raises(CastRefused, match=f"dim {refused[0]}") as caught:
            cast_codes("float32", target, codes)
        assert caught.value.ours == f"float32 {value('float32', codes[refused[0]]):g}"


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_another_library_agrees(source: str, target: str) -> None:
    """ml_dtypes, over many values of every size; it saturates or overflows where we refuse."""
    kinds: dict[str, Any] = {name: getattr(ml_dtypes, name, None) or getattr(np, name) for name in TYPES}
    random = np.random.default_rng(7)
    codes = random.integers(0, 1 << BITS[source], 3 * BLOCK + 5, dtype=storage_dtype(source))
    with np.errstate(all="ignore"):
        values = codes.view(kinds[source]).astype(np.float32)
        want = values.astype(kinds[target])
        again = want.astype(np.float32)
    fits = np.isnan(values) | (np.isfinite(values) == np.isfinite(again)) & ~np.isnan(again)
    codes, want, values = codes[fits], want[fits], values[fits]
    out = np.zeros((1, 1, 1, 1, codes.size), storage_dtype(target))
    apply(known(source, target), codes.reshape(out.shape), out)
    bits = want.view(storage_dtype(target))
    with np.errstate(all="ignore"):
        nans = np.isnan(out.reshape(-1).view(kinds[target]).astype(np.float32))
    np.testing.assert_array_equal(nans, np.isnan(values))
    np.testing.assert_array_equal(out.reshape(-1)[~nans], bits[~nans])


def test_e4m3fn_and_e4m3fnuz_are_never_confused() -> None:
    """The same byte is worth half in fnuz. No cast between them copies bytes at equal scales, none is called exact that
    is not, -0 of fn never becomes the NaN of fnuz, and the codes that only one of them has are not taken for others."""
    fn, fnuz = "float8_e4m3fn", "float8_e4m3fnuz"
    for source, target in ((fn, fnuz), (fnuz, fn)):
        fits = [c for c in range(256) if math.isfinite(value(source, c)) and abs(value(source, c)) <= LARGEST[target]]
        out = cast_codes(source, target, fits)
        moved = [c for c, got in zip(fits, out, strict=True) if got == c]
        assert moved == [0]
        for code, got in zip(fits, out, strict=True):
            assert abs(value(target, got) - value(source, code)) <= known(source, target).absolute
    assert not known(fn, fnuz).exact
    assert not known(fnuz, fn).exact
    assert not known(fnuz, fn, 2.0).exact
    assert cast_codes(fn, fnuz, [0x80, 0x00]) == [0, 0]
    assert cast_codes(fn, fnuz, [0x7F, 0xFF]) == [0x80, 0x80]
    assert {c & 0x7F for c in cast_codes(fnuz, fn, [0x80])} == {0x7F}

    # With the scale doubled, fn's bytes are fnuz's, but for -0 and NaN, and every value stays what it is.
    assert known(fn, fnuz, 0.5).exact
    finite = [code for code in range(256) if math.isfinite(value(fn, code))]
    assert cast_codes(fn, fnuz, finite, target_scale=2.0) == [0 if code == 0x80 else code for code in finite]
    assert cast_codes(fn, fnuz, [0x7F, 0xFF], target_scale=2.0) == [0x80, 0x80]

    # With the scale halved, fnuz's bytes are fn's, but for NaN and what fn has NaN for: that is refused.
    finite = [code for code in range(256) if math.isfinite(value(fnuz, code)) and code not in (0x7F, 0xFF)]
    assert cast_codes(fnuz, fn, finite, source_scale=2.0) == finite
    for code in (0x7F, 0xFF):
        with pytest.raises(CastRefused, match="240 does not fit float8_e4m3fn"):
            cast_codes(fnuz, fn, [code], source_scale=2.0)
    assert known(fnuz, fn, 2.0).largest == 448


@pytest.mark.parametrize("element", [name for name in TYPES if name != "float8_e4m3fnuz"])
@pytest.mark.parametrize("source", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_negative_zero_stays(source: str, element: str) -> None:
    assert cast_codes(source, element, [1 << (BITS[source] - 1)]) == [1 << (BITS[element] - 1)]


@pytest.mark.parametrize("source", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_what_rounds_to_negative_zero_is_not_the_nan_of_fnuz(source: str) -> None:
    smallest = (1 << (BITS[source] - 1)) | 1
    if value(source, 1) >= 2.0**-10:
        assert cast_codes(source, "float8_e4m3fnuz", [smallest]) == [0x82]
    else:
        assert cast_codes(source, "float8_e4m3fnuz", [smallest]) == [0]
    assert cast_codes(source, "float8_e4m3fnuz", [smallest & ~1]) == [0]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_infinity_stays_or_is_refused(source: str, target: str) -> None:
    if source not in INFINITE:
        return
    for sign in (1, -1):
        code = rounded(source, sign * math.inf)
        if target in INFINITE:
            assert value(target, cast_codes(source, target, [code])[0]) == sign * math.inf
        else:
            with pytest.raises(CastRefused, match=r"-?inf does not fit"):
                cast_codes(source, target, [0, code])


def test_a_value_that_does_not_fit_is_named_with_its_place_and_nothing_is_written() -> None:
    source = np.zeros((3, 2, 4, 5, 6), np.uint16)
    source[1, 1, 2, 3, 4] = 0x7E96  # 1e38
    source[2, 0, 0, 0, 0] = 0x7E96
    target = np.full(source.shape, 0x1234, np.uint16)
    with pytest.raises(CastRefused) as caught:
        apply(known("bfloat16", "float16"), source, target, origin=(10, 20, 30))
    error = caught.value
    assert error.field == "cast"
    assert error.message == "9.96921e+37 does not fit float16: layer 11, v, head 22, token 33, dim 4"
    assert (error.ours, error.theirs) == ("bfloat16 9.96921e+37", "float16 up to 65504")
    assert error.remedy
    assert isinstance(error, Refused)
    assert (target == 0x1234).all()


def test_a_bad_value_in_the_last_block_keeps_the_first_from_being_written() -> None:
    source = np.zeros((1, 1, 1, 1, 3 * BLOCK + 1), np.uint32)
    source[..., -1] = float32_code(65520.0)
    target = np.full(source.shape, 7, np.uint16)
    with pytest.raises(CastRefused, match=f"the vector, head 0, token 0, dim {3 * BLOCK}"):
        apply(known("float32", "float16"), source, target)
    assert (target == 7).all()


@pytest.mark.parametrize(("source", "target"), PAIRS)
@pytest.mark.parametrize("size", [0, 1, 2, 3, BLOCK - 1, BLOCK, BLOCK + 1])
def test_any_number_of_elements(source: str, target: str, size: int) -> None:
    one = rounded(source, 1.5)
    assert cast_codes(source, target, [one] * size) == [rounded(target, 1.5)] * size


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_each_layer_and_kv_has_its_scales(source: str, target: str) -> None:
    random = np.random.default_rng(3)
    scales = random.uniform(0.2, 2.0, (3, 2))
    to_scales = random.uniform(0.2, 2.0, (3, 2)).astype(np.float32)
    codes = encode(random.uniform(-20, 20, (3, 2, 2, 3, 5)), FORMATS[source]).astype(storage_dtype(source))
    together, alone = (np.zeros(codes.shape, storage_dtype(target)) for _ in range(2))
    apply(known(source, target), codes, together, source_scale=scales, target_scale=to_scales)
    for layer in range(3):
        for side in range(2):
            place = np.s_[layer : layer + 1, side : side + 1]
            a, b = float(scales[layer, side]), float(to_scales[layer, side])
            cast = known(source, target, a / b)
            out = np.zeros((1, 1, 2, 3, 5), alone.dtype)
            apply(cast, np.ascontiguousarray(codes[place]), out, source_scale=a, target_scale=b)
            alone[place] = out
            want = decode(codes[place], FORMATS[source]) * a
            error = np.abs(decode(out, FORMATS[target]) * b - want)
            assert (error <= np.maximum(cast.relative * np.abs(want), cast.absolute * b)).all()
    np.testing.assert_array_equal(together, alone)


def test_a_value_that_its_scale_makes_too_large_is_named_with_the_scale() -> None:
    source = chunk("float16", [rounded("float16", 300.0)])
    out = np.zeros(source.shape, np.uint8)
    apply(known("float16", "float8_e4m3fn"), source, out)
    with pytest.raises(CastRefused) as caught:
        apply(known("float16", "float8_e4m3fn"), source, out, target_scale=0.5)
    assert caught.value.theirs == "float8_e4m3fn up to 448 at 0.5 of that scale"


@pytest.mark.parametrize("element", [*TYPES, "int8", "uint8[fp8_ds_mla]"])
def test_the_same_type_is_copied_bit_by_bit(element: str) -> None:
    cast = known(element, element)
    assert (cast.exact, cast.relative, cast.absolute, cast.bound) == (True, 0, 0, "exact")
    bits = ELEMENTS[element] * 8
    codes = np.random.default_rng(1).integers(0, 1 << bits, (2, 2, 3, 4, 5), dtype=storage_dtype(element))
    out = np.zeros_like(codes)
    apply(cast, codes, out, source_scale=0.3, target_scale=0.3)
    np.testing.assert_array_equal(out, codes)


def test_rounding_goes_through_nothing_in_between() -> None:
    """1 + 2^-8 + 2^-20 is just above the middle of two bf16 values; through float16 it would be a tie and go down."""
    assert cast_codes("float32", "bfloat16", [float32_code(1 + 2**-8 + 2**-20)]) == [0x3F81]
    third = float(Fraction(1, 16) + Fraction(1, 1 << 22))
    assert cast_codes("float32", "float8_e4m3fn", [float32_code(1 + third)]) == [rounded("float8_e4m3fn", 1 + third)]
    assert cast_codes("float32", "float8_e4m3fn", [float32_code(1 + 1 / 16)]) == [0x38]


@pytest.mark.parametrize(
    ("source", "target"),
    [("uint8[fp8_ds_mla]", "bfloat16"), ("bfloat16", "uint8[fp8_ds_mla]"), ("float64", "float32"), ("float32", "x")],
)
def test_there_is_no_such_cast(source: str, target: str) -> None:
    assert between(source, target) is None


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_a_scale_is_a_positive_number(scale: float) -> None:
    with pytest.raises(CastRefused, match="scale"):
        cast_codes("float8_e4m3fn", "bfloat16", [0], source_scale=scale)


@pytest.mark.parametrize(("ours", "theirs"), [(1e300, 1e-300), (1e-300, 1e300)])
def test_scales_too_far_apart_are_refused(ours: float, theirs: float) -> None:
    with pytest.raises(CastRefused, match="scale"):
        cast_codes("float8_e4m3fn", "bfloat16", [0], source_scale=ours, target_scale=theirs)


@pytest.mark.parametrize("ratio", [0.0, -1.0, math.nan, math.inf])
def test_there_is_no_cast_for_what_is_no_ratio(ratio: float) -> None:
    assert between("float8_e4m3fn", "bfloat16", ratio) is None


@pytest.mark.parametrize("extreme", [1e300, 1e-300])
def test_extreme_scales_are_refused_or_within_the_bound(extreme: float) -> None:
    one = rounded("float8_e4m3fn", 1.0)
    assert cast_codes("float8_e4m3fn", "float32", [0, 0x80], source_scale=extreme) == [0, 1 << 31]
    if extreme > 1:
        with pytest.raises(CastRefused):
            cast_codes("float8_e4m3fn", "float32", [one], source_scale=extreme)
        with pytest.raises(CastRefused):
            cast_codes("float32", "float32", [float32_code(3e38)], source_scale=extreme)
    else:
        assert cast_codes("float8_e4m3fn", "float32", [one], source_scale=extreme) == [0]


def test_arrays_that_are_not_of_the_cast_are_turned_away() -> None:
    cast = known("bfloat16", "float32")
    source, target = np.zeros((1, 2, 3, 4, 5), np.uint16), np.zeros((1, 2, 3, 4, 5), np.uint32)
    for ours, theirs in (
        (source.view(np.int16), target),
        (source, target.astype(np.uint16)),
        (source, target[:, :1].copy()),
        (source[..., ::2], target[..., :3].copy()),
        (source.reshape(-1), target.reshape(-1)),
    ):
        with pytest.raises(LayoutError):
            apply(cast, ours, theirs)
    with pytest.raises(LayoutError, match="quantize"):
        apply(known("bfloat16", "int8"), source, np.zeros(source.shape, np.uint8))


def test_threads_share_the_tables() -> None:
    errors: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            ratio = 1 + seed / 8
            codes = list(range(256))[:0x78]
            got = cast_codes("float8_e4m3fn", "float32", codes, source_scale=ratio)
            assert got == [rounded("float32", value("float8_e4m3fn", code) * ratio) for code in codes]
        except BaseException as exc:  # noqa: BLE001 — carried to the test's thread
            errors.append(exc)

    threads = [threading.Thread(target=run, args=(seed % 5,)) for seed in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not errors


@contextlib.contextmanager
def flushing() -> Iterator[None]:
    """This thread's float arithmetic takes and gives zeros for subnormals, as after loading some libraries."""
    if platform.machine() != "x86_64":
        pytest.skip("needs x86-64")
    try:
        memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError as exc:
        pytest.skip(f"needs executable memory: {exc}")
    memory.write(b"\x0f\xae\x17\xc3")  # ldmxcsr [rdi]; ret
    load = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    load(ctypes.addressof(ctypes.c_uint32(0x1F80 | 0x8040)))
    try:
        assert (np.array([1], np.uint32).view(np.float32) * np.float32(1)).item() == 0
        yield
    finally:
        load(ctypes.addressof(ctypes.c_uint32(0x1F80)))


@pytest.mark.parametrize("ratio", [1.0, 0.7])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_process_that_flushes_subnormals_changes_nothing(source: str, target: str, ratio: float) -> None:
    step = 1 if BITS[source] < 32 else 40503
    codes = np.arange(0, 1 << (BITS[source] - 1), step, dtype=storage_dtype(source))
    codes = np.concatenate([codes[: 1 << 15], codes[: 1 << 15] | FORMATS[source].sign]).astype(codes.dtype)
    values = np.abs(decode(codes, FORMATS[source])) * ratio
    codes = codes[np.isnan(values) | (values <= FORMATS[target].brim)]
    want = cast_codes(source, target, codes, source_scale=ratio)
    with flushing():
        casting._table.cache_clear()
        casting._pairs.cache_clear()
        got = cast_codes(source, target, codes, source_scale=ratio)
    assert got == want


@pytest.mark.parametrize(
    ("text", "covered"),
    [
        ("bfloat16->float16", {"bfloat16->float16"}),
        (" bfloat16 -> float16 ", {"bfloat16->float16"}),
        ("*->float16", {f"{name}->float16" for name in (*TYPES, "int8")}),
        ("bfloat16->int8", {"bfloat16->int8"}),
    ],
)
def test_consent_covers_what_it_names(text: str, covered: set[str]) -> None:
    consent = parse_consent(text)
    every = [between(source, target) for source in ELEMENTS for target in ELEMENTS]
    assert {cast.name for cast in every if cast and consent.covers(cast)} == covered
    assert parse_consent(str(consent)) == consent


@pytest.mark.parametrize(
    "text",
    ["", "float16", "->", "bf16->fp16", "bfloat16->*", "*->*", "*", "float16->uint8[fp8_ds_mla]", "a->b->float16"],
)
def test_what_is_no_consent_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="float8_e4m3fnuz") as caught:
        parse_consent(text)
    assert caught.value.field == "casts"


def test_a_cast_says_its_bound() -> None:
    assert (
        str(known("bfloat16", "float16")) == "bfloat16->float16: error at most 2^-25; refuses what rounds beyond 65504"
    )
    assert known("float16", "bfloat16").bound == "relative error at most 2^-8"
    assert known("bfloat16", "float32").bound == "exact"
    assert known("float32", "float8_e4m3fn").bound == (
        "relative error at most 2^-4 or error at most 2^-10; refuses what rounds beyond 448 and infinities"
    )


def test_the_docs_have_every_cast_with_its_bound() -> None:
    page = Path(__file__).parents[3] / "docs" / "casts.md"
    types = [*FORMATS, INTEGER]
    every = [known(source, target) for source in types for target in types if source != target]
    rows = [line for line in page.read_text().splitlines() if line.startswith("| `")]
    assert rows == [f"| `{cast.name}` | {'yes' if cast.exact else 'no'} | {cast.bound} |" for cast in every]
