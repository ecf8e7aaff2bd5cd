"""What the elements of one cache group are to those of another: the same, castable, or foreign. Pure.

What travels is the producer's elements or the consumer's, whichever are narrower, so a cast happens on one side only:
the producer narrows as it stages, the consumer widens as it loads. Between types of one size, and to a type with
constant scales (which only the consumer knows), the consumer casts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from deeplink.kvconnector.contracts.contract import CacheGroup
from deeplink.kvconnector.layouts import cast as casts
from deeplink.kvconnector.layouts.cast import Cast
from deeplink.kvconnector.layouts.layout import ELEMENTS

TENSOR, TOKEN_HEAD = "tensor", "token-head"
SCHEMES = {
    "float8_e4m3fn": TENSOR,
    "float8_e4m3fnuz": TENSOR,
    "float8_e5m2": TENSOR,
    "int8": TOKEN_HEAD,
}
"""Which scales give an element type its meaning; the others have none."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """How one group's elements become another's: what travels, and the cast, if there is one."""

    wire: str
    cast: Cast | None = None
    exact: bool = True


def problem(group: CacheGroup) -> tuple[str, str]:
    """The field of a group that cannot be understood, and what to do; two empty texts for a good one."""
    if group.dtype not in ELEMENTS:
        return "dtype", f"known: {', '.join(ELEMENTS)}"
    expected = SCHEMES.get(group.dtype)
    scales = group.scales
    if (scales.scheme if scales else None) != expected:
        return "scales", f"elements of {group.dtype} need {expected or 'no'} scales"
    if scales is None:
        return "", ""
    if scales.scheme == TENSOR and len(scales.values) != 2 * len(group.layers):
        return "scales", f"one scale for K and one for V of each layer are {2 * len(group.layers)} of them"
    if scales.scheme == TOKEN_HEAD and scales.values:
        return "scales", "scales per token and head are with the tokens, not in the contract"
    if not all(math.isfinite(value) and value > 0 for value in scales.values):
        return "scales", "a scale is a positive number"
    if scales.scheme == TOKEN_HEAD and scales.dtype != "float32":
        return "scales", "scales per token and head are of type float32"
    return "", ""


def conversion(ours: CacheGroup, theirs: CacheGroup) -> Conversion | None:
    """From a producer's group to a consumer's, both without `problem`; None when no cast leads there."""
    known = frozenset(theirs.layers)
    common = [layer for layer in ours.layers if layer in known]
    ratios = sorted({a / b for a, b in zip(_constants(ours, common), _constants(theirs, common), strict=True)})
    found = [cast for ratio in ratios if (cast := casts.between(ours.dtype, theirs.dtype, ratio)) is not None]
    if not found:
        return None
    worst = min(found, key=lambda cast: (cast.exact, -cast.relative))
    narrower = ELEMENTS[theirs.dtype] < ELEMENTS[ours.dtype] and all(one == 1 for one in _constants(theirs, common))
    none = ours.dtype == theirs.dtype and ratios == [1.0]
    return Conversion(theirs.dtype if narrower else ours.dtype, None if none else worst, worst.exact)


def _constants(group: CacheGroup, layers: Sequence[int]) -> list[float]:
    """The constant scales of these layers, K and V in turn; 1 where there are none."""
    if group.scales is None or not group.scales.values:
        return [1.0, 1.0] * len(layers)
    place = {layer: at for at, layer in enumerate(group.layers)}
    places = [place[layer] for layer in layers]
    return [value for place in places for value in group.scales.values[2 * place : 2 * place + 2]]
