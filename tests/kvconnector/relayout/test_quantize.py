"""int8 with a scale for each token and head: the stated bound, what is refused, and codes that have a zero."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numbers_by_hand import BITS, INFINITE, LARGEST, TYPES, rounded, value

from deeplink.errors import CastRefused, LayoutError
from deeplink.kvconnector.layouts.cast import SMALLEST_SCALE, Cast, between
from deeplink.kvconnector.layouts.elements import FORMATS
from deeplink.kvconnector.relayout.casting import BLOCK, apply
from deeplink.kvconnector.relayout.codes import decode, encode
from deeplink.kvconnector.relayout.convert import storage_dtype
from deeplink.kvconnector.relayout.quantize import dequantize, quantize

Array = npt.NDArray[Any]


def known(source: str, target: str) -> Cast:
    cast = between(source, target)
    assert cast is not None
    return cast


def quantized(source: str, codes: Array) -> tuple[Array, Array]:
    out = np.full(codes.shape, 0x5A, np.uint8)
    scales = np.full((*codes.shape[:4], 1), -1, np.float32)
    quantize(known(source, "int8"), codes, out, scales)
    return out.view(np.int8), scales


def restored(target: str, codes: Array, scales: Array, zeros: Array | None = None) -> Array:
    out = np.full(codes.shape, 0x5A, storage_dtype(target))
    dequantize(known("int8", target), codes.view(np.uint8), scales, out, zeros_LSHT1=zeros)
    return out


def check(source: str, codes: Array) -> None:
    """Against the definition, in numbers wide enough to have no rounding of their own."""
    of = FORMATS[source]
    values = decode(codes, of)
    ints, scales = quantized(source, codes)
    largest = np.abs(values).max(axis=4, keepdims=True)
    wide = np.maximum(largest / 127, SMALLEST_SCALE)
    np.testing.assert_allclose(scales, wide, rtol=2**-23)
    assert (np.abs(ints.astype(int)) <= 127).all()
    cast = known(source, "int8")
    meant = ints.astype(np.longdouble) * scales.astype(np.longdouble)
    error = np.abs(meant - values)
    assert (error <= np.maximum(cast.row * largest, cast.absolute)).all()
    assert (error <= scales * (0.5 + 2**-15)).all()

    # And back: what the codes mean, rounded once to float32 and once to the target.
    for target in ("float32", "bfloat16", source):
        back = known("int8", target)
        if float(largest.max()) * (1 + 2**-20) > LARGEST[target]:
            continue
        out = decode(restored(target, ints, scales), FORMATS[target])
        slack = np.maximum(back.relative * np.abs(meant), back.absolute)
        assert (np.abs(out - meant) <= slack).all()


@pytest.mark.parametrize("source", TYPES)
@given(data=st.data())
def test_the_error_is_within_the_bound(source: str, data: st.DataObject) -> None:
    shape = data.draw(arrays.array_shapes(min_dims=5, max_dims=5, max_side=3))
    scale = data.draw(st.sampled_from([0.0, 2.0**-148, 2.0**-127, 2.0**-20, 1.0, 200.0, LARGEST[source]]))
    unit = st.floats(-1, 1, width=32)
    values = np.array(data.draw(arrays.arrays(np.float64, shape, elements=unit))) * scale
    check(source, encode(values, FORMATS[source]).astype(storage_dtype(source)))


@pytest.mark.parametrize("source", TYPES)
def test_every_code_of_a_small_type_is_within_the_bound(source: str) -> None:
    if BITS[source] == 32:
        codes = np.random.default_rng(5).integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
    else:
        codes = np.arange(1 << BITS[source], dtype=storage_dtype(source))
    codes = codes[np.isfinite(decode(codes, FORMATS[source]))]
    check(source, codes[: codes.size // 16 * 16].reshape(1, 1, 1, -1, 16))


@pytest.mark.parametrize("source", TYPES)
def test_a_row_of_zeros_stays_one(source: str) -> None:
    ints, scales = quantized(source, np.zeros((1, 2, 1, 3, 4), storage_dtype(source)))
    assert not ints.any()
    assert (scales == np.float32(SMALLEST_SCALE)).all()
    assert not decode(restored(source, ints, scales), FORMATS[source]).any()


def test_the_largest_of_a_row_has_the_code_127() -> None:
    values = np.array([[-3.0, 1.5, 0.0, 3.0 / 127]], np.float32)
    ints, scales = quantized("float32", values.view(np.uint32).reshape(1, 1, 1, 1, 4))
    assert ints.reshape(-1).tolist() == [-127, 64, 0, 1]  # 63.5 is a tie: to even
    assert scales.item() == np.float32(3) / np.float32(127)


def test_rows_do_not_touch_each_other() -> None:
    values = np.ones((2, 2, 3, 4, 8), np.float32) * np.arange(1, 49, dtype=np.float32).reshape(2, 2, 3, 4, 1)
    ints, scales = quantized("float32", values.view(np.uint32))
    assert (ints == 127).all()
    np.testing.assert_allclose(scales, values[..., :1] / 127, rtol=1e-6)


def test_many_blocks_are_as_one() -> None:
    values = np.random.default_rng(2).standard_normal((1, 2, 3, BLOCK // 200, 64)).astype(np.float32)
    ints, scales = quantized("float32", values.view(np.uint32))
    for head in range(3):
        part = np.ascontiguousarray(values[:, :, head : head + 1])
        one, one_scales = quantized("float32", part.view(np.uint32))
        np.testing.assert_array_equal(ints[:, :, head : head + 1], one)
        np.testing.assert_array_equal(scales[:, :, head : head + 1], one_scales)


@pytest.mark.parametrize("source", TYPES)
def test_what_no_scale_can_reach_is_refused_and_nothing_is_written(source: str) -> None:
    special = [FORMATS[source].nan]
    if source in INFINITE:
        for sign in (1, -1):
            infinity = rounded(source, sign * math.inf)
            assert infinity is not None
            special.append(infinity)
    if source not in ("float8_e4m3fnuz",):
        special.append(FORMATS[source].nan | FORMATS[source].sign)
    for code in special:
        codes = np.zeros((2, 2, 3, 4, 5), storage_dtype(source))
        codes[1, 0, 2, 3, 4] = code
        out, scales = np.full(codes.shape, 9, np.uint8), np.full((2, 2, 3, 4, 1), 9, np.float32)
        with pytest.raises(CastRefused, match="layer 6, k, head 2, token 103, dim 4") as caught:
            quantize(known(source, "int8"), codes, out, scales, origin=(5, 0, 100))
        assert caught.value.theirs == "int8, finite values"
        assert (out == 9).all()
        assert (scales == 9).all()


@pytest.mark.parametrize("target", TYPES)
def test_every_code_means_itself_times_its_scale(target: str) -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(1, 1, 1, 1, 256)
    for scale in (1.0, 0.5, 0.3, 2.0**-10, 1.7):
        scales = np.full((1, 1, 1, 1, 1), scale, np.float32)
        out = restored(target, codes, scales).reshape(-1)
        for code in range(256):
            meant = (code - 256 if code > 127 else code) * float(scales.item())
            single = rounded("float32", meant)
            assert single is not None
            assert out[code] == rounded(target, value("float32", single)), (scale, code)


@pytest.mark.parametrize("target", TYPES)
def test_a_code_beyond_the_target_is_refused_and_nothing_is_written(target: str) -> None:
    codes = np.zeros((1, 2, 1, 2, 3), np.uint8)
    codes[0, 1, 0, 1, 2] = 0x81  # -127
    scales = np.full((1, 2, 1, 2, 1), LARGEST[target] / 64, np.float32)
    out = np.full(codes.shape, 9, storage_dtype(target))
    with pytest.raises(CastRefused, match="layer 0, v, head 0, token 1, dim 2"):
        dequantize(known("int8", target), codes, scales, out)
    assert (out == 9).all()
    scales[0, 1, 0, 1] /= 2
    dequantize(known("int8", target), codes, scales, out)
    assert decode(out, FORMATS[target])[0, 1, 0, 1, 2] < -LARGEST[target] * 0.9


@given(
    low=st.floats(-1e4, 1e4, width=32),
    span=st.floats(2.0**-10, 1e4, width=32),
    code=st.integers(0, 255),
    data=st.data(),
)
def test_codes_with_a_zero_mean_the_difference_times_the_scale(
    low: float, span: float, code: int, data: st.DataObject
) -> None:
    """As LMDeploy keeps them: unsigned codes, ``scale = (max - min) / 255``, ``zero = -min / scale``."""
    scale = np.float32(span) / np.float32(255)
    zero = -np.float32(low) / scale
    numbers = [np.full((1, 1, 1, 1, 1), number, np.float32) for number in (scale, zero)]
    target = data.draw(st.sampled_from(["float32", "bfloat16", "float16"]))
    codes = np.full((1, 1, 1, 1, 1), code, np.uint8)
    meant = (Fraction(code) - Fraction(float(zero))) * Fraction(float(scale))
    back = known("int8", target)
    got = Fraction(float(decode(restored(target, codes, *numbers), FORMATS[target]).item()))
    assert abs(got - meant) <= max(Fraction(back.relative) * abs(meant), Fraction(back.absolute))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_scale_or_zero_that_is_no_number_is_refused(bad: float) -> None:
    codes = np.zeros((1, 1, 1, 2, 2), np.uint8)
    good, spoilt = np.ones((1, 1, 1, 2, 1), np.float32), np.ones((1, 1, 1, 2, 1), np.float32)
    spoilt[0, 0, 0, 1] = bad
    with pytest.raises(CastRefused, match="scale"):
        restored("float16", codes, spoilt)
    with pytest.raises(CastRefused, match="zero"):
        restored("float16", codes, good, spoilt)


def test_nothing_at_all_is_fine() -> None:
    for shape in ((0, 2, 1, 1, 4), (1, 1, 1, 0, 4)):
        ints, scales = quantized("bfloat16", np.zeros(shape, np.uint16))
        assert restored("bfloat16", ints, scales).size == 0


def test_arrays_that_do_not_go_together_are_turned_away() -> None:
    source, target = np.zeros((1, 2, 3, 4, 5), np.uint16), np.zeros((1, 2, 3, 4, 5), np.uint8)
    scales = np.zeros((1, 2, 3, 4, 1), np.float32)
    cast, back = known("float16", "int8"), known("int8", "float16")
    for bad in (scales.astype(np.float64), scales[..., 0], scales[:, :1].copy()):
        with pytest.raises(LayoutError, match="scale for each token"):
            quantize(cast, source, target, bad)
        with pytest.raises(LayoutError, match="scale for each token"):
            dequantize(back, target, scales, source, zeros_LSHT1=bad)
    with pytest.raises(LayoutError, match="casting"):
        quantize(known("float16", "float32"), source, target, scales)
    with pytest.raises(LayoutError, match="quantize"):
        apply(cast, source, target)
