"""What the codes of each element type mean, written down one type at a time, and rounding as a search in a list.

It shares nothing with the package: no common formula, no numpy. All values and midpoints are exact in Python's floats.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left
from functools import cache

TYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")
BITS = dict(zip(TYPES, (32, 16, 16, 8, 8, 8), strict=True))
LARGEST = dict(
    zip(
        TYPES,
        (float.fromhex("0x1.fffffep127"), float.fromhex("0x1.fep127"), 65504.0, 448.0, 240.0, 57344.0),
        strict=True,
    )
)
INFINITE = ("float32", "bfloat16", "float16", "float8_e5m2")


def value(element: str, code: int) -> float:
    if element == "float32":
        return float(struct.unpack("<f", struct.pack("<I", code))[0])
    if element == "bfloat16":
        return float(struct.unpack("<f", struct.pack("<I", code << 16))[0])
    if element == "float16":
        return float(struct.unpack("<e", struct.pack("<H", code))[0])
    sign = -1.0 if code >= 0x80 else 1.0
    if element == "float8_e5m2":
        exponent, mantissa = code >> 2 & 31, code & 3
        if exponent == 31:
            return math.nan if mantissa else sign * math.inf
        return sign * (mantissa / 4 * 2.0**-14 if exponent == 0 else (1 + mantissa / 4) * 2.0 ** (exponent - 15))
    exponent, mantissa = code >> 3 & 15, code & 7
    if element == "float8_e4m3fn":
        if exponent == 15 and mantissa == 7:
            return math.nan
        return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    if code == 0x80:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-7 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 8))


@cache
def magnitudes(element: str) -> list[float]:
    """Of the finite codes from 0 up, and the one that would come next; the index is the code."""
    found: list[float] = []
    while math.isfinite(step := value(element, len(found))) and len(found) < 1 << (BITS[element] - 1):
        found.append(step)
    return [*found, found[-1] + (found[-1] - found[-2])]


def rounded(element: str, x: float) -> int | None:
    """The code nearest to `x`, ties to the even code; None where the type has none. NaN is for the caller."""
    minus = 1 << (BITS[element] - 1) if math.copysign(1.0, x) < 0 else 0
    if math.isinf(x):
        return (
            minus | {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00, "float8_e5m2": 0x7C}[element]
            if (element in INFINITE)
            else None
        )
    if element == "float32":
        try:
            return int(struct.unpack("<I", struct.pack("<f", x))[0])  # C's conversion rounds to nearest even
        except OverflowError:
            return None
    steps = magnitudes(element)
    above = bisect_left(steps, abs(x))
    if above == len(steps):
        return None
    code = above
    if steps[above] != abs(x):
        below, middle = above - 1, (steps[above - 1] + steps[above]) / 2
        code = below if abs(x) < middle or (abs(x) == middle and below % 2 == 0) else above
    if code == len(steps) - 1:
        return None
    return code if code == 0 and element == "float8_e4m3fnuz" else minus | code
