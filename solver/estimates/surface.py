"""A smooth surface through measured times, which knows how far from the measurements it is.

Times are fitted as logarithms over logarithms of the sizes, so that errors are relative and a power law is a plane. The
surface is a Gaussian process: a prior curve and a plane whose height and slopes are free, plus a deviation that two
points share the more the closer they are. Near measurements it follows them, far away it is the plane, and its standard
deviation grows on the way. How much the deviation matters, over which distance and with what noise, is chosen from a
fixed grid by likelihood, so the same points give the same surface.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_DISTANCES = (0.5, 0.8, 1.2, 2.0, 3.0, 5.0)
_VARIANCES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
_NOISES = (1e-4, 4e-4, 2e-3)
_FREE = 100.0
"""Variance of what is free, in logarithms: anything."""


@dataclass(frozen=True, slots=True)
class Surface:
    """Fitted with `fit`. `residuals` are what each point's neighbours say about it, as log(predicted / measured)."""

    points: Array
    weights: Array
    inverse: Array
    center: Array
    distance: float
    variance: float
    noise: float
    slopes: tuple[int, ...]
    residuals: tuple[float, ...]

    def at(self, point: Sequence[float], prior: float) -> tuple[float, float]:
        """The logarithm of the time at `point` (sizes) with this `prior` (log), and its standard deviation."""
        place = np.log(np.maximum(np.asarray(point, dtype=np.float64), 1e-9)).reshape(1, -1)
        shared = _shared(place, self.points, self)[0]
        own = float(_shared(place, place, self)[0, 0])
        spread = own - float(shared @ self.inverse @ shared)
        return prior + float(shared @ self.weights), math.sqrt(max(spread, 0.0) + self.noise)


@dataclass(frozen=True, slots=True)
class _Shape:
    center: Array
    distance: float
    variance: float
    slopes: tuple[int, ...]


def fit(points: Sequence[Sequence[float]], logs: Sequence[float], priors: Sequence[float]) -> Surface:
    """A surface through `logs` at `points`; `priors` is the curve it deviates from. An axis along which all points are
    the same has no slope."""
    places = np.log(np.maximum(np.asarray(points, dtype=np.float64), 1e-9))
    values = np.asarray(logs, dtype=np.float64) - np.asarray(priors, dtype=np.float64)
    center = places.mean(axis=0)
    spread = places.max(axis=0) - places.min(axis=0)
    slopes = tuple(int(axis) for axis in range(places.shape[1]) if spread[axis] > 0.1) if len(values) > 3 else ()
    best: tuple[float, _Shape, float, Array] | None = None
    for distance in _DISTANCES:
        for variance in _VARIANCES:
            shape = _Shape(center, distance, variance, slopes)
            matrix = _shared(places, places, shape)
            for noise in _NOISES:
                full = matrix + noise * np.eye(len(values))
                lower = np.linalg.cholesky(full)
                half = np.linalg.solve(lower, values)
                unlikely = 0.5 * float(half @ half) + float(np.log(np.diag(lower)).sum())
                if best is None or unlikely < best[0] - 1e-9:
                    best = (unlikely, shape, noise, full)
    assert best is not None
    _, shape, noise, full = best
    inverse: Array = np.linalg.inv(full).astype(np.float64)
    weights = inverse @ values
    residuals = tuple(float(value) for value in -weights / np.diag(inverse))
    return Surface(places, weights, inverse, center, shape.distance, shape.variance, noise, shape.slopes, residuals)


def _shared(a: Array, b: Array, shape: _Shape | Surface) -> Array:
    """Covariance of the surface between the places of `a` and those of `b`."""
    apart = (a[:, None, :] - b[None, :, :]) / shape.distance
    matrix: Array = shape.variance * np.exp(-0.5 * (apart**2).sum(axis=-1)) + _FREE
    for axis in shape.slopes:
        matrix += _FREE * np.outer(a[:, axis] - shape.center[axis], b[:, axis] - shape.center[axis])
    return matrix
