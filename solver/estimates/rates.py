"""How long prefill and decode take on one chip, with where each number comes from and how wrong it may be.

The best there is, in this order: a measurement at that very point, a surface through measurements of this chip, model
and group size, a roofline whose fractions were fitted to measurements of the chip, a roofline with usual fractions on
the datasheet's peaks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from deeplink.errors import RateError
from deeplink.solver.estimates import roofline, surface
from deeplink.solver.estimates.model import Model
from deeplink.solver.estimates.roofline import Chip, Fractions, Step
from deeplink.solver.estimates.surface import Surface
from deeplink.solver.kinds import Kind as Engine

Kind = Literal["measured", "interpolated", "calibrated", "datasheet"]
Phase = Literal["prefill", "decode"]

QUANTILE = 1.645
"""Standard deviations on either side that hold nine of ten cases."""
_FASTER = 1.02
"""Measurements may be this much faster than the roofline before they are impossible: peaks are rounded."""


@dataclass(frozen=True, slots=True)
class Rate:
    """A time with its relative error: nine of ten times it is within ``seconds / (1 + error)`` and
    ``seconds * (1 + error)``."""

    seconds: float
    error: float
    kind: Kind
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """`requests` requests in one step on a group of `tp` chips. In prefill each has `tokens` new tokens behind
    `context` cached ones; in decode one new token behind `context`. `line` is where it was read. `error` is how wrong
    the time may be beyond what repeats show, where it was put together from others' times. `engine` is the kind of the
    engine that was measured, "" where nobody says."""

    chip: str
    model: str
    tp: int
    phase: Phase
    requests: int
    tokens: int
    context: float
    seconds: float
    source: str
    line: int = 0
    error: float = 0.0
    engine: Engine | Literal[""] = ""

    @property
    def step(self) -> Step:
        return Step(self.requests, self.tokens, self.context)

    @property
    def sizes(self) -> tuple[float, float]:
        return (self.requests, self.tokens if self.phase == "prefill" else self.context)


def check(row: Measurement, model: Model, chip: Chip, kv_dtype: str) -> None:
    """Raises RateError for a time that the chip cannot reach: the measurement, its unit or the chip is wrong."""
    limit = roofline.seconds(model, chip, row.step, row.tp, roofline.IDEAL, kv_dtype)
    if row.seconds * _FASTER < limit:
        raise RateError(
            f"line {row.line}: {row.phase} of {row.requests} x {row.tokens} tokens of {model.name} on {row.tp} x "
            f"{chip.name} is faster than its peaks allow",
            field="seconds",
            ours=f"{row.seconds:.6g}",
            theirs=f"at least {limit:.6g}",
            remedy="check the unit, the batch and the chip of this row, or remove it",
        )


@dataclass(slots=True)
class Rates:
    """Times of one model on a group of `tp` chips.

    `rows` are measurements of just that; with three or more of a phase a surface goes through them. `fractions` are
    those of the roofline, which is the prior of the surface, or all there is. All times are multiplied by `pace`.
    """

    model: Model
    chip: Chip
    tp: int
    kv_dtype: str
    fractions: Fractions
    rows: Sequence[Measurement] = ()
    pace: float = 1.0
    _surfaces: dict[Phase, Surface] = field(default_factory=dict)
    _exact: dict[tuple[Phase, tuple[float, float]], list[Measurement]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for row in self.rows:
            if row.context == 0 or row.phase == "decode":
                self._exact.setdefault((row.phase, row.sizes), []).append(row)
        for phase in ("prefill", "decode"):
            mine = [(sizes, _median(rows)) for (kind, sizes), rows in self._exact.items() if kind == phase]
            if len(mine) >= 3:
                mine.sort()
                points = [sizes for sizes, _ in mine]
                priors = [self._prior(phase, sizes) for sizes in points]
                self._surfaces[phase] = surface.fit(points, [math.log(value) for _, value in mine], priors)

    def prefill(self, tokens: float, *, requests: float = 1, context: float = 0.0) -> Rate:
        """One step over `requests` prompts of `tokens` new tokens each, behind `context` cached tokens."""
        rate = self._paced(self._rate("prefill", (requests, tokens)))
        if context > 0:
            with_context, without = (self._roofline(Step(requests, tokens, c)) for c in (context, 0.0))
            return Rate(rate.seconds * with_context / without, rate.error, _less(rate.kind), rate.source)
        return rate

    def decode(self, requests: float, context: float) -> Rate:
        """One step of `requests` sequences with `context` tokens each."""
        return self._paced(self._rate("decode", (requests, context)))

    @property
    def measured(self) -> frozenset[Phase]:
        """The phases of which enough was measured to say what lies between."""
        return frozenset(self._surfaces)

    def left_out(self, phase: Phase) -> tuple[float, ...]:
        """For each measured point, what the others say about it, as log(predicted / measured)."""
        found = self._surfaces.get(phase)
        return found.residuals if found else ()

    def _paced(self, rate: Rate) -> Rate:
        return rate if self.pace == 1 else replace(rate, seconds=rate.seconds * self.pace)

    def _rate(self, phase: Phase, sizes: tuple[float, float]) -> Rate:
        if same := self._exact.get((phase, sizes)):
            times = [row.seconds for row in same]
            spread, beyond = max(times) / min(times) - 1, max(row.error for row in same)
            kind_: Kind = "interpolated" if beyond else "measured"
            return Rate(_median(same), max(spread, beyond, 0.02), kind_, same[0].source)
        prior = self._prior(phase, sizes)
        found = self._surfaces.get(phase)
        if found is None:
            kind: Kind = "calibrated" if self.fractions.fitted else "datasheet"
            source = f"roofline of {self.chip.source or self.chip.name}, {self.fractions.source}"
            return Rate(math.exp(prior), self.fractions.error, kind, source)
        log, deviation = found.at(sizes, prior)
        measured = next(row.source for row in self.rows if row.phase == phase)
        # Never faster than the chip can be, however the plane slopes.
        limit = roofline.seconds(self.model, self.chip, _step(phase, sizes), self.tp, roofline.IDEAL, self.kv_dtype)
        left_out = _quantile([abs(residual) for residual in found.residuals], 0.9)
        beyond = max(row.error for row in self.rows if row.phase == phase)
        error = max(math.expm1(max(QUANTILE * deviation, left_out)), beyond)
        return Rate(max(math.exp(log), limit), error, "interpolated", f"surface through {measured}")

    def _prior(self, phase: Phase, sizes: tuple[float, float]) -> float:
        return math.log(self._roofline(_step(phase, sizes)))

    def _roofline(self, step: Step) -> float:
        return roofline.seconds(self.model, self.chip, step, self.tp, self.fractions, self.kv_dtype)


def _step(phase: Phase, sizes: tuple[float, float]) -> Step:
    requests, size = sizes
    return Step(requests, size) if phase == "prefill" else Step(requests, 1.0, size)


def _less(kind: Kind) -> Kind:
    return "interpolated" if kind == "measured" else kind


def _median(rows: Sequence[Measurement]) -> float:
    times = sorted(row.seconds for row in rows)
    middle = len(times) // 2
    return times[middle] if len(times) % 2 else (times[middle - 1] + times[middle]) / 2


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0
