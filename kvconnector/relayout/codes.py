"""Codes of an element type to the numbers they mean and back, for whole arrays.

The formula is that of `deeplink.kvconnector.layouts.elements`. It is exact, not fast: casts use it to make their
tables.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from deeplink.kvconnector.layouts.elements import Format

Values = npt.NDArray[np.float64]


def decode(codes: npt.NDArray[Any], of: Format) -> Values:
    """`Format.value` of every code; `codes` are unsigned integers."""
    magnitude = codes.astype(np.int64) & (of.sign - 1)
    hidden = 1 << (of.precision - 1)
    exponent = np.maximum(magnitude >> (of.precision - 1), 1) - 1
    mantissa = (magnitude - exponent * hidden).astype(np.float64)
    values: Values = np.ldexp(mantissa, (exponent + of.quantum).astype(np.int32))
    values[magnitude > of.top] = math.inf
    values[magnitude > max(of.top, of.infinity)] = math.nan
    if not of.negative_zero:
        values[codes == of.nan] = math.nan
    signed: Values = np.copysign(values, np.where(codes & codes.dtype.type(of.sign), -1.0, 1.0))
    return signed


def encode(values: Values, to: Format) -> npt.NDArray[np.int64]:
    """The nearest code to every value, ties to even; beyond the largest it is infinity's or, without one, NaN's."""
    magnitude = np.abs(values)
    infinite = np.isinf(magnitude)
    magnitude[~np.isfinite(magnitude)] = 0.0
    exponent = np.maximum(np.frexp(magnitude)[1] - to.precision - to.quantum, 0)
    exponent[magnitude == 0.0] = 0
    mantissa = np.rint(np.ldexp(magnitude, -(exponent + to.quantum))).astype(np.int64)
    codes: npt.NDArray[np.int64] = (exponent.astype(np.int64) << (to.precision - 1)) + mantissa
    codes[infinite | (codes > to.top)] = to.infinity or to.nan
    # A type without a negative zero has NaN in its place.
    negative = np.signbit(values) if to.negative_zero else np.signbit(values) & (codes != 0)
    codes[negative] |= to.sign
    codes[np.isnan(values)] = to.nan
    return codes
