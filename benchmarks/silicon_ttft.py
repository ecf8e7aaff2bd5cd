"""Times to first token of dense models as they were served on H100 and H200, and how much of them the table can tell.

A run keeps `c` requests at a time going. The first `c` come at once and wait for each other's prefill; those after them
come one by one, as answers end. So the mean is a prefill, plus a part of `c` prefills, plus steps of decode that are
under way, plus what the engine takes for any request, plus a start that is shared out among the requests, of which
there are the more the larger `c` is. These five numbers are fitted for each engine to the runs of two models and
predict the third.

That is off by a half, and `Errors` says why it is not the form of the prediction. The runs come from several sources,
mostly one for each model and engine, and how requests were sent there, how many in all and how long one waited before
measuring is not in the table. With the same five numbers, and one factor for each source that is taken from the answer
(`factor`), a quarter remains; the factors are from a third to more than double. With all five numbers taken from the
answer (`seen`) a fifth remains.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import numpy as np
import silicon
from silicon import Array, Run

START = (2.0, 0.08, 1.0, 0.02, 0.2)
"""Prefills, prefills for each request at a time, decode steps, seconds, seconds shared out among those at a time."""
_FAR = 7.0
"""No number is further than this from its start, in logarithms."""
_PULL = 0.002


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of one run's time to first token: predicted from other models; the same, with its source's factor
    taken from the answer; with everything taken from the answer of its source."""

    run: Run
    predicted: float
    factor: float
    seen: float


def left_out() -> list[Errors]:
    every = silicon.runs()
    of = np.array([silicon.features(run) for run in every])
    seconds = np.array([run.ttft for run in every])
    engines = sorted({run.engine for run in every})
    found = []
    for held in silicon.CONFIGS:
        others = np.array([run.model != held for run in every])
        numbers = silicon.fit(of[others], np.array([run.tpot for run in every])[others])
        parts = _parts(every, of, numbers)
        for engine in engines:
            mine = np.array([run.engine == engine for run in every])
            test, train = mine & ~others, mine & others
            if not test.any():
                continue
            told = parts[test] @ _fit(parts[train], seconds[train])
            best = parts[test] @ _fit(parts[test], seconds[test])
            runs = [run for run, is_mine in zip(every, test, strict=True) if is_mine]
            for run, *errors in zip(
                runs,
                _off(told, seconds[test]),
                _off(told * _factor(told, seconds[test]), seconds[test]),
                _off(best, seconds[test]),
                strict=True,
            ):
                found.append(Errors(run, *(float(error) for error in errors)))
    return found


def _parts(every: list[Run], of: Array, numbers: Array) -> Array:
    """What the five numbers are multiplied by, one row for each run, in seconds."""
    alone = silicon.prefill(numbers, of)
    together = np.array([float(run.together) for run in every])
    return np.stack([alone, alone * together, silicon.step(numbers, of), np.ones_like(alone), 1 / together], axis=1)


def _fit(parts: Array, seconds: Array) -> Array:
    start = np.log(np.asarray(START))

    def loss(logs: Array) -> float:
        if (np.abs(logs - start) > _FAR).any():
            return math.inf
        off = np.abs(np.log(parts @ np.exp(logs) / seconds)).mean()
        return float(off + _PULL * ((logs - start) ** 2).sum())

    return np.exp(silicon.pattern(loss, start))


def _factor(predicted: Array, seconds: Array) -> float:
    """Of those that make one run right, the one with the least error of all."""
    return float(min(seconds / predicted, key=lambda factor: _off(predicted * factor, seconds).mean()))


def _off(predicted: Array, seconds: Array) -> Array:
    found: Array = np.abs(predicted / seconds - 1)
    return found


if __name__ == "__main__":
    errors = left_out()
    for name in ("predicted", "factor", "seen"):
        values = [getattr(one, name) for one in errors]
        print(f"{name}: mean {statistics.mean(values):.3f}, median {statistics.median(values):.3f}")
    for source in sorted({(one.run.model, one.run.engine) for one in errors}):
        mine = [one for one in errors if (one.run.model, one.run.engine) == source]
        text = ", ".join(
            f"{name} {statistics.mean(getattr(one, name) for one in mine):.3f}"
            for name in ("predicted", "factor", "seen")
        )
        print(f"{' '.join(source)}, {len(mine)} runs: {text}")
