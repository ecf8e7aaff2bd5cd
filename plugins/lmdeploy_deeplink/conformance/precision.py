"""How far a result may be from the exact one.

The bound is no tuned number but follows from what an operator is allowed to do (`operators`): sum in float32, and round
to the element type a stated number of times. For a sum of n terms in float32, in any order, the error is at most
``n u / (1 - n u)`` times the sum of the terms' magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, 2nd
edition, section 4.2), and every rounding to an element type adds its unit roundoff. An exp, a division or a root in
float32 is taken to be good to 16 units: vendors' fast ones are good to 2 or 3, and several of them come in a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Precision:
    """`unit` is half the distance from 1 to the next value; `tiny` half the distance from 0 to the next."""

    dtype: str
    unit: float
    tiny: float
    source: str


FLOAT32 = Precision("float32", 2.0**-24, 2.0**-150, "IEEE 754-2019, table 3.5: binary32, p = 24, emin = -126")
FLOAT16 = Precision("float16", 2.0**-11, 2.0**-25, "IEEE 754-2019, table 3.5: binary16, p = 11, emin = -14")
BFLOAT16 = Precision("bfloat16", 2.0**-8, 2.0**-134, "binary32 with p = 8: 7 stored bits, emin = -126")
INT8 = Precision("int8", 0.0, 0.5, "integers: the nearest one")

PRECISIONS = {one.dtype: one for one in (FLOAT32, FLOAT16, BFLOAT16, INT8)}
FLOATS = ("float32", "float16", "bfloat16")

# Of float32.
SMALLEST_NORMAL = 2.0**-126

_FUNCTION_UNITS = 16
# Products of two errors, which the sums above leave out.
_SECOND_ORDER = 1.02


@dataclass(frozen=True, slots=True)
class Bounded:
    """The exact value, and how far from it a result may be, element by element. Slack 0 asks for equal bytes."""

    value: Array
    slack: Array


def bounded(value: Array, precision: Precision, *, roundings: int, magnitude: Any, terms: int = 0) -> Bounded:
    """`roundings` to the element type of the value itself, and float32 sums of `terms` with this `magnitude`.

    `magnitude` is the sum of the terms' magnitudes; for what is no sum, the value's own.
    """
    slack = rounded(np.abs(value), precision, roundings) + summed(magnitude, terms)
    return Bounded(value, slack)


def rounded(magnitude: Any, precision: Precision, times: int = 1) -> Any:
    """The most that rounding to an element type, so many times, changes values of that magnitude."""
    return (magnitude * precision.unit + precision.tiny) * times * _SECOND_ORDER


def summed(magnitude: Any, terms: int) -> Any:
    """The most that a float32 sum, and functions before or after it, are off."""
    return magnitude * (terms + _FUNCTION_UNITS) * FLOAT32.unit * _SECOND_ORDER


def exactly(value: Any) -> Bounded:
    made = np.asarray(value, np.float64)
    return Bounded(made, np.zeros_like(made))
