"""Which element types can become which, and what that costs. Pure; `deeplink.kvconnector.relayout.casting` does it.

A value is what a code means times its scale. A cast takes each value to the nearest one that the target has, ties to
even, subnormals included. Nothing saturates and nothing is flushed to zero: a finite value that would round beyond the
target's largest is refused, and so is an infinity where the target has none. NaN stays NaN, in another code if need
be; -0 stays -0, except in float8_e4m3fnuz, which has none.

The error of a cast is bounded for every value that it accepts: by `relative` times the value, or `absolute` times the
target's scale, whichever is larger; for int8 also by `row` times the largest magnitude of the same token and head.

float8_e4m3fn and float8_e4m3fnuz share bytes but not values: the same byte is worth half in fnuz. With equal scales
every fn value up to 240 has its equal in fnuz; with the target's scale doubled every one has (`ratio` 1/2). The other
way round with the scale halved every value has, save ±240 of fnuz, which would be 480, and is refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from deeplink.errors import ConfigError
from deeplink.kvconnector.layouts.elements import FORMATS, INTEGER
from deeplink.kvconnector.layouts.layout import ELEMENTS

ANY = "*"
ARROW = "->"

ROW = 1 / 254 + 2**-22
"""int8 has 127 steps up to the row's largest magnitude and is off by half of one, and by the rounding of the scale."""
SMALLEST_SCALE = 2.0**-126
"""An int8 row has at least this scale, so that no scale is subnormal or, for a row of zeros, zero. Where the process
flushes subnormals, smaller values become zero with int8, and only there: that cast computes with float32."""

_WOBBLE = 2.0**-20
"""Share of the rounding error by which scales that are no powers of two may raise it: they are applied in float64."""


@dataclass(frozen=True, slots=True)
class Cast:
    """One element type becoming another.

    `exact`: every finite value arrives unchanged, and none is refused. Otherwise `bound` says in words what
    ``|out - in| <= max(relative * |in|, absolute * target_scale, row * max |row|)`` says for machines, and which
    values, in units of the target's scale, are refused: those that round to more than `largest`.
    """

    source: str
    target: str
    exact: bool
    bound: str
    relative: float
    absolute: float
    row: float = 0.0
    largest: float = math.inf

    @property
    def name(self) -> str:
        """What an operator consents to."""
        return f"{self.source}{ARROW}{self.target}"

    def __str__(self) -> str:
        return f"{self.name}: {self.bound}"


def between(source: str, target: str, ratio: float = 1.0) -> Cast | None:
    """The cast from `source` to `target`, or None if there is none: opaque records are only ever themselves.

    `ratio` is the source's scale over the target's; it must be positive and finite, else there is no cast. The scales
    of int8 come with the data, so it does not apply there.
    """
    if source not in ELEMENTS or target not in ELEMENTS or not 0.0 < ratio < math.inf:
        return None
    if source == target and (ratio == 1.0 or source not in FORMATS):
        return Cast(source, target, True, "exact", 0.0, 0.0)
    if source in FORMATS and target in FORMATS:
        return _floating(source, target, ratio)
    if source in FORMATS and target == INTEGER:
        bound = "error at most 0.394 % of the largest magnitude of the same token and head; refuses infinities and NaN"
        return Cast(source, target, False, bound, 0.0, SMALLEST_SCALE, row=ROW)
    if source == INTEGER and target in FORMATS:
        # Code minus zero and its product with the scale are each rounded to float32, the result to the target.
        to = FORMATS[target]
        relative, absolute = max(2.0**-to.precision, 2.0**-23), max(math.ldexp(1.0, to.quantum), SMALLEST_SCALE)
        bound = _worded(relative, absolute, to.largest, infinite=False)
        return Cast(source, target, False, bound, relative, absolute, largest=to.largest)
    return None


def _floating(source: str, target: str, ratio: float) -> Cast:
    of, to = FORMATS[source], FORMATS[target]
    mantissa, shift = math.frexp(ratio)
    if mantissa == 0.5:
        # A power of two only moves the source's range, so what has enough bits and room in the target stays exact.
        shift -= 1
        relative = 0.0 if of.precision <= to.precision else 2.0**-to.precision
        absolute = 0.0 if of.quantum + shift >= to.quantum else math.ldexp(0.5, to.quantum)
    else:
        relative, absolute = 2.0**-to.precision * (1 + _WOBBLE), math.ldexp(0.5, to.quantum) * (1 + _WOBBLE)
    fits = of.largest * ratio <= to.largest
    exact = fits and relative == absolute == 0.0
    infinite = bool(of.infinity and not to.infinity)
    bound = _worded(relative, absolute, math.inf if fits else to.largest, infinite)
    return Cast(source, target, exact, bound, relative, absolute, largest=math.inf if fits else to.largest)


def _worded(relative: float, absolute: float, largest: float, infinite: bool) -> str:
    errors = [_power("relative error at most", relative)] if relative else []
    errors += [_power("error at most", absolute)] if absolute else []
    refused = [f"what rounds beyond {largest:.6g}"] if largest < math.inf else []
    refused += ["infinities"] if infinite else []
    said = [" or ".join(errors) or "exact"] + ([f"refuses {' and '.join(refused)}"] if refused else [])
    return "; ".join(said)


def _power(text: str, bound: float) -> str:
    """A bound that is a power of two but for a few last bits is said without those."""
    mantissa, exponent = math.frexp(bound)
    return f"{text} 2^{exponent - 1}" if mantissa < 0.5 * (1 + 2.0**-12) else f"{text} {bound:.3g}"


@dataclass(frozen=True, slots=True)
class Consent:
    """What an operator has agreed to lose: one cast by its name, or with ``*`` for the source, all into one type."""

    source: str
    target: str

    def covers(self, cast: Cast) -> bool:
        return cast.target == self.target and self.source in (ANY, cast.source)

    def __str__(self) -> str:
        return f"{self.source}{ARROW}{self.target}"


def parse_consent(text: str) -> Consent:
    """Raises ConfigError for anything but ``source->target`` with a cast between them, or ``*->target``."""
    source, arrow, target = (part.strip() for part in text.partition(ARROW))
    known = [*FORMATS, INTEGER]
    if not arrow or target not in known or source not in (ANY, *known):
        raise ConfigError(
            f"{text[:80]!r} is not a cast",
            field="casts",
            remedy=f'write it as "bfloat16{ARROW}float16" or "{ANY}{ARROW}float16"; types: {", ".join(known)}',
        )
    return Consent(source, target)
