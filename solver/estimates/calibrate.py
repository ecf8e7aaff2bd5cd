"""Which part of its peaks a chip reaches, from measurements of it with other sizes of groups than the wanted one.

The fractions are the best of a fixed grid by the mean error of the logarithms, so the same rows give the same ones. The
error is that of predicting each size of group from the others, which nine of ten rows are within.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import product

from deeplink.solver.estimates import roofline
from deeplink.solver.estimates.model import Model
from deeplink.solver.estimates.rates import Measurement
from deeplink.solver.estimates.roofline import Chip, Fractions

LEAST = 6
"""Rows that are needed: there are three numbers to find."""
_MOST = 200
_COMPUTE = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_MEMORY = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_FIXED = (0.0, 5e-6, 1e-5, 3e-5, 1e-4, 2e-4)
_SMALLEST_ERROR = 0.1
_ONE_SIZE = 0.5
"""Error where only one size was measured, so that nothing says how the others scale."""


def fitted(rows: Sequence[Measurement], model: Model, chip: Chip, kv_dtype: str) -> Fractions | None:
    """The chip's fractions with this model, or None when the rows are too few."""
    mine = tuple(row for row in rows if row.chip == chip.name)
    return _fitted(mine, model, chip, kv_dtype) if len(mine) >= LEAST else None


@lru_cache(maxsize=64)
def _fitted(rows: tuple[Measurement, ...], model: Model, chip: Chip, kv_dtype: str) -> Fractions:
    some = rows[:: -(-len(rows) // _MOST)]
    best = _best(some, model, chip, kv_dtype)
    sizes = sorted({row.tp for row in some})
    off = [_beyond(_off(some, best, model, chip, kv_dtype))]
    for size in sizes if len(sizes) > 1 else ():
        others = _best([row for row in some if row.tp != size], model, chip, kv_dtype)
        off.append(_beyond(_off([row for row in some if row.tp == size], others, model, chip, kv_dtype)))
    alone = _ONE_SIZE if len(sizes) == 1 else 0.0
    error = max(math.expm1(max(off)), alone, _SMALLEST_ERROR)
    return Fractions(*best, error, f"fractions fitted to {len(rows)} measurements of it")


def _best(rows: Sequence[Measurement], model: Model, chip: Chip, kv_dtype: str) -> tuple[float, float, float]:
    return min(
        product(_COMPUTE, _MEMORY, _FIXED),
        key=lambda choice: (sum(_off(rows, choice, model, chip, kv_dtype)), choice),
    )


def _off(
    rows: Sequence[Measurement], choice: tuple[float, float, float], model: Model, chip: Chip, kv_dtype: str
) -> list[float]:
    """By how much each row is missed, as a logarithm without its sign."""
    fractions = Fractions(*choice, 0.0, "")
    return [
        abs(math.log(roofline.seconds(model, chip, row.step, row.tp, fractions, kv_dtype) / row.seconds))
        for row in rows
    ]


def _beyond(off: Sequence[float]) -> float:
    """What nine of ten are within."""
    return sorted(off)[math.ceil(0.9 * len(off)) - 1]
