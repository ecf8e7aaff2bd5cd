"""One call of one operator, its exact results, and what makes it pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lmdeploy_deeplink.conformance.precision import Bounded

if TYPE_CHECKING:
    import torch

    from lmdeploy_deeplink.operators.vendor import Vendor


@dataclass(frozen=True, slots=True)
class Trial:
    """What an operator is called with, and `wrong`: what is wrong with what it gave, empty when nothing is."""

    keywords: Mapping[str, Any]
    wrong: Callable[[Any], str]


@dataclass(frozen=True, slots=True)
class Case:
    """`name` is unique, and says what the case is about. `make` makes it on the vendor's device."""

    operator: str
    dtype: str
    name: str
    make: Callable[[Vendor], Trial]


def within(*expected: Bounded, shapes: Sequence[tuple[int, ...]] | None = None) -> Callable[[Any], str]:
    """Passes results, one tensor or several, that are as near to the exact ones as they must be."""

    def wrong(results: Any) -> str:
        got = list(results) if isinstance(results, (tuple, list)) else [results]
        if len(got) != len(expected):
            return f"gave {len(got)} results, not {len(expected)}"
        for number, (one, exact) in enumerate(zip(got, expected, strict=True)):
            if text := distance(one, exact):
                return f"result {number}: {text}" if len(got) > 1 else text
        return ""

    return wrong


def distance(got: torch.Tensor, exact: Bounded) -> str:
    """What is wrong with a tensor, by the element that is furthest beyond its slack; empty when nothing is."""
    if tuple(got.shape) != exact.value.shape:
        return f"shape {tuple(got.shape)}, not {exact.value.shape}"
    values = got.detach().cpu().double().numpy()
    # A value that is no number is beyond any slack.
    beyond = np.where(np.isnan(values), np.inf, np.abs(values - exact.value) - exact.slack)
    if beyond.size == 0 or beyond.max() <= 0:
        return ""
    place = np.unravel_index(beyond.argmax(), beyond.shape)
    count = int((beyond > 0).sum())
    where = ", ".join(str(int(index)) for index in place)
    return (
        f"{count} of {beyond.size} elements are off, most at [{where}]: {values[place]:.6g} where "
        f"{exact.value[place]:.6g} is exact and {exact.slack[place]:.2g} is allowed"
    )
