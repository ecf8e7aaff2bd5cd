"""A chunk from one element type to another, with whatever scales either of them has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from deeplink.errors import LayoutError
from deeplink.kvconnector.contracts.contract import Scales
from deeplink.kvconnector.layouts.cast import between
from deeplink.kvconnector.relayout import casting, quantize
from deeplink.kvconnector.relayout.plan import consecutive

Constants = npt.NDArray[np.float64]
"""Scales that are constant per layer and K or V: ``[L, S]``."""


def constants(scales: Scales | None, of: Sequence[int], layers: Sequence[int], kv: int) -> Constants:
    """The scales of some `layers`, from those stated for the layers `of`; all 1 where there are none."""
    if scales is None or not scales.values:
        return np.ones((len(layers), kv))
    stated = np.asarray(scales.values, np.float64).reshape(-1, 2)
    return stated[[of.index(layer) for layer in layers], :kv]


@dataclass(frozen=True, slots=True)
class Packed:
    """The elements of a chunk ``[L, S, H, T, D]`` of type `dtype`, with the scales that go with them."""

    dtype: str
    elements: npt.NDArray[Any]
    constants: Constants = field(default_factory=lambda: np.ones((1, 1)))
    token_scales: npt.NDArray[np.float32] | None = None

    def layers(self, first: int, count: int) -> Packed:
        """Some of the layers alone."""
        some = slice(first, first + count)
        return Packed(
            self.dtype,
            self.elements[some],
            self.constants if len(self.constants) == 1 else self.constants[some],
            None if self.token_scales is None else self.token_scales[some],
        )


def recast(source: Packed, target: Packed, layers: Sequence[int], head: int, token: int) -> None:
    """Write what `source` means into `target`: those layers of the model, from that head and token on.

    Raises CastRefused, naming the place in the model, for a value that the target does not have; some of the target is
    written by then.
    """
    for place, layer, count in consecutive(layers):
        _recast(source.layers(place, count), target.layers(place, count), (layer, head, token))


def _recast(source: Packed, target: Packed, origin: casting.Origin) -> None:
    ratio = 1.0
    if target.token_scales is None and source.token_scales is None:
        ratios = source.constants / target.constants
        ratio = float(ratios.flat[0]) if (ratios == ratios.flat[0]).all() else 1.0
    cast = between(source.dtype, target.dtype, ratio)
    if cast is None:
        raise LayoutError(f"nothing casts {source.dtype} to {target.dtype}", field="dtype")
    if target.token_scales is not None:
        quantize.quantize(cast, source.elements, target.elements, target.token_scales, origin=origin)
        target.token_scales[...] *= _per_row(source.constants)
    elif source.token_scales is not None:
        scales = np.ascontiguousarray(source.token_scales / _per_row(target.constants))
        quantize.dequantize(cast, source.elements, scales, target.elements, origin=origin)
    else:
        casting.apply(
            cast,
            source.elements,
            target.elements,
            source_scale=source.constants,
            target_scale=target.constants,
            origin=origin,
        )


def _per_row(constants: Constants) -> npt.NDArray[np.float32]:
    return constants.astype(np.float32)[:, :, None, None, None]
