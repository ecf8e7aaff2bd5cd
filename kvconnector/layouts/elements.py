"""Element types of a cache as number formats. Pure: no arrays here.

Every floating-point type is sign and magnitude, and the magnitudes of its codes are in the order of their values: with
precision `p` and quantum `q`, the code ``(e << (p - 1)) + m`` with ``m < 2^p`` is ``m * 2^(e + q)``. That covers
subnormals (``e`` is 0) and a mantissa that rounding has carried to ``2^p`` (it is the next code), so one formula
serves all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Format:
    """A floating-point type of `bits` bits. `precision` counts significant bits with the hidden one; the smallest step,
    that of the subnormals, is ``2^quantum``; `top` is the code of the largest finite magnitude.

    `infinity` is the code of +inf, 0 where the type has none. NaNs are the magnitudes above infinity, or above `top`
    where there is none; types without a negative zero use its code for their only NaN.
    """

    bits: int
    precision: int
    quantum: int
    top: int
    infinity: int = 0
    negative_zero: bool = True

    @property
    def sign(self) -> int:
        """The sign bit."""
        return 1 << (self.bits - 1)

    @property
    def nan(self) -> int:
        """A quiet NaN."""
        if not self.negative_zero:
            return self.sign
        return self.infinity | 1 << (self.precision - 2) if self.infinity else self.sign - 1

    @property
    def largest(self) -> float:
        """The largest finite value."""
        return self.value(self.top)

    @property
    def brim(self) -> float:
        """The largest number that rounds to `largest` and not beyond it: halfway to the next, if the tie goes down."""
        half = math.ldexp(0.5, (self.top >> (self.precision - 1)) - 1 + self.quantum)
        return math.nextafter(self.largest + half, 0.0) if self.top % 2 else self.largest + half

    def value(self, code: int) -> float:
        """What a code means, at scale 1."""
        magnitude = code & (self.sign - 1)
        if code == self.nan or magnitude > max(self.top, self.infinity):
            return math.nan
        if magnitude > self.top:
            value = math.inf
        else:
            exponent, mantissa = divmod(magnitude, 1 << (self.precision - 1))
            if exponent:
                mantissa, exponent = mantissa + (1 << (self.precision - 1)), exponent - 1
            value = math.ldexp(mantissa, exponent + self.quantum)
        return -value if code & self.sign else value


FORMATS = {
    "float32": Format(32, 24, -149, 0x7F7F_FFFF, 0x7F80_0000),
    "bfloat16": Format(16, 8, -133, 0x7F7F, 0x7F80),
    "float16": Format(16, 11, -24, 0x7BFF, 0x7C00),
    "float8_e4m3fn": Format(8, 4, -9, 0x7E),
    "float8_e4m3fnuz": Format(8, 4, -10, 0x7F, negative_zero=False),
    "float8_e5m2": Format(8, 3, -16, 0x7B, 0x7C),
}
"""By the names of `deeplink.kvconnector.layouts.layout.ELEMENTS`."""

INTEGER = "int8"
"""The one integer type that is cast: ``[-127, 127]`` times a scale for each token and head."""
