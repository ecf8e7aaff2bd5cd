"""Times on a chip of which only the datasheet is known, with an interval that is learnt from the other chips.

For each of five chips in turn: the reached fractions of the peaks are fitted to the four others, and how wrong that is
is seen by leaving each of those four out as well. The interval is from where one in twenty of these errors is below to
where one in twenty is above, for prefill and for decode apart, every chip counting alike (conformal prediction over
chips). Nothing of the chip itself is used but its datasheet.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from pathlib import Path

import numpy as np
import silicon
from numpy.typing import NDArray

from deeplink.solver.estimates import catalogue, importers, table
from deeplink.solver.estimates.rates import Measurement

DATA = Path(__file__).parents[1] / "solver" / "data"
START = (0.5, 0.7, 6e-5, 0.5, 0.7, 0.5, 1e-5)
"""Reached parts of compute for an operation a watt a second, and of memory; seconds of a layer; the power with which
watts count; reached part of the link; the power with which the heads that share a head of the cache count, for kernels
of that time gave each head a block of threads of its own, which reads it; seconds until all chips of a layer have met,
for each doubling of their number."""
_MOST = (1.0, 1.0, 1e-2, 1.0, 1.0, 1.0, 1e-3)
_PULL = 0.01
Array = NDArray[np.float64]


def found(share: float = 0.9) -> tuple[float, float]:
    """Which part of the settings is within the interval, and the median of its half-widths."""
    chips, prefill, of, seconds = _settings()
    names = sorted(set(chips))
    within, widths = [], []
    for held in names:
        errors = np.zeros(len(chips))
        for other in names:
            if other != held:
                mine = chips == other
                fitted = _fit(of[(chips != held) & ~mine], seconds[(chips != held) & ~mine])
                errors[mine] = np.log(_times(fitted, of[mine]) / seconds[mine])
        fitted = _fit(of[chips != held], seconds[chips != held])
        for phase in (prefill, ~prefill):
            learnt, mine = phase & (chips != held), phase & (chips == held)
            low, high = (_quantile(errors[learnt], chips[learnt], part) for part in ((1 - share) / 2, (1 + share) / 2))
            off = np.log(_times(fitted, of[mine]) / seconds[mine])
            within += list((low <= off) & (off <= high))
            widths += [math.expm1((high - low) / 2)] * int(mine.sum())
    return float(np.mean(within)), statistics.median(widths)


def _quantile(errors: Array, chips: NDArray[np.str_], part: float) -> float:
    counts = {name: int((chips == name).sum()) for name in set(chips)}
    weights = np.array([1 / counts[name] for name in chips])
    order = np.argsort(errors)
    reached = np.cumsum(weights[order]) / weights.sum()
    return float(errors[order][min(int(np.searchsorted(reached, part)), len(errors) - 1)])


def _settings() -> tuple[NDArray[np.str_], NDArray[np.bool_], Array, Array]:
    """By setting: the chip, whether it is prefill, the features, and the seconds."""
    models = catalogue.known_models()
    rows = importers.splitwise(DATA / "splitwise" / "perf_model.csv.gz") + importers.helix(DATA / "helix", models)
    chips = {row.chip: catalogue.chip(row.chip) for row in rows}
    kept, _ = table.possible(rows, models, chips, "float16")
    settings: dict[tuple[object, ...], list[Measurement]] = defaultdict(list)
    for row in kept:
        if chips[row.chip].watts:  # without the power-capped H100, whose peak is not known
            settings[row.chip, row.model, row.tp, row.phase, row.sizes, row.source].append(row)
    first = [many[0] for many in settings.values()]
    seconds = [statistics.median(row.seconds for row in many) for many in settings.values()]
    prefill = np.array([row.phase == "prefill" for row in first])
    return (
        np.array([row.chip for row in first]),
        prefill,
        np.array([_features(row) for row in first]),
        np.array(seconds),
    )


def _features(row: Measurement) -> list[float]:
    """Seconds at the peaks: operations, weights, cache, all-reduces; layers; watts for 10^12 operations a second; heads
    that share one of the cache; meetings of chips."""
    model, chip = catalogue.known_models()[row.model], catalogue.chip(row.chip)
    step, tp = row.step, row.tp
    new = step.requests * step.tokens
    flops = 2 * model.active * new + model.attention_flops(new, step.context + (step.tokens + 1) / 2)
    kv = step.requests * (step.context + step.tokens) * model.kv_bytes("float16") / min(tp, model.kv_heads)
    told = model.layers * 2 * new * model.hidden * 2.0 * 2 * (tp - 1) / tp / chip.link
    peak = chip.peak(model.bits)
    weights = model.read_bytes(new) / tp
    return [
        flops / tp / peak,
        weights / chip.bandwidth,
        kv / chip.bandwidth,
        told,
        float(model.layers),
        chip.watts / (peak / 1e12),
        model.heads / model.kv_heads,
        model.layers * 2 * math.log2(tp),
    ]


def _times(numbers: Array, of: Array) -> Array:
    compute, memory, layer, power, link, shared, meeting = numbers
    flops, weights, cache, told, layers, watts, sharing, meetings = of.T
    reached = np.minimum(compute * watts**power, 0.95)
    read = (weights + cache * sharing**shared) / memory
    found_: Array = np.maximum(flops / reached, read) + told / link + layers * layer + meetings * meeting
    return found_


def _fit(of: Array, seconds: Array) -> Array:
    start = np.log(np.asarray(START))

    def loss(logs: Array) -> float:
        if (np.exp(logs) > _MOST).any():
            return math.inf
        off = np.abs(np.log(_times(np.exp(logs), of) / seconds)).mean()
        return float(off + _PULL * ((logs - start) ** 2).sum())

    return np.exp(silicon.pattern(loss, start))


if __name__ == "__main__":
    for nominal in (0.8, 0.85, 0.9):
        coverage, half = found(nominal)
        print(f"{nominal:.0%} intervals: within {coverage:.1%}, median half-width {half:.0%}")
