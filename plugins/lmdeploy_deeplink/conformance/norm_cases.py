"""Cases of the norms. The edges are tiny values, whose squares vanish in 16 bits, and large ones: squares overflow."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lmdeploy_deeplink.conformance import exact as formulas
from lmdeploy_deeplink.conformance.case import Case, Trial, distance, within
from lmdeploy_deeplink.conformance.inputs import Inputs, exact
from lmdeploy_deeplink.conformance.precision import FLOAT32, FLOATS, PRECISIONS, Array, Bounded, rounded

if TYPE_CHECKING:
    from lmdeploy_deeplink.operators.vendor import Vendor

SHAPES = ((1, 1), (1, 64), (7, 96), (3, 576), (2, 5, 256), (0, 64), (5, 4096))
EPSILONS = (1e-5, 1e-6, 1e-8)
# Of the values; 3e-5 squared is below the smallest that float16 has, 300 squared above the largest.
SCALES = (1.0, 3e-5, 300.0)
LARGEST = 127


def cases() -> Iterator[Case]:
    for operator in ("rms_norm", "add_rms_norm"):
        for dtype in FLOATS:
            for shape in SHAPES:
                for epsilon in EPSILONS:
                    for scale in SCALES:
                        yield _case(operator, dtype, shape, epsilon, scale)
            yield _case(operator, dtype, (4, 128), 1e-6, 0.0)
            yield _case(operator, dtype, (4, 128), 1e-6, 1.0, strided=True)
    for operator in ("rms_norm_w8a8", "add_rms_norm_w8a8"):
        for dtype in FLOATS:
            for shape in SHAPES[1:5]:
                for scale in SCALES:
                    yield _case(operator, dtype, shape, 1e-6, scale)


def _case(
    operator: str, dtype: str, shape: tuple[int, ...], epsilon: float, scale: float, strided: bool = False
) -> Case:
    name = f"{operator} {dtype} {'x'.join(map(str, shape))} epsilon {epsilon:g} values {scale:g}{' strided' * strided}"
    return Case(operator, dtype, name, partial(_trial, operator, dtype, name, shape, epsilon, scale, strided))


def _trial(
    operator: str,
    dtype: str,
    name: str,
    shape: tuple[int, ...],
    epsilon: float,
    scale: float,
    strided: bool,
    vendor: Vendor,
) -> Trial:
    inputs, precision = Inputs(name, dtype, vendor.device), PRECISIONS[dtype]
    wide = (*shape[:-1], shape[-1] * 2) if strided else shape
    x = inputs.normal(*wide, scale=scale)[..., : shape[-1]]
    weight = inputs.normal(shape[-1], scale=0.3, mean=1.0)
    keywords: dict[str, Any] = {"hidden_states": x, "weight": weight, "epsilon": epsilon}
    summing = operator.startswith("add")
    total = exact(x)
    if summing:
        keywords["residual"] = inputs.normal(*shape, scale=scale)
        total = total + exact(keywords["residual"])
    normed = formulas.rms_norm(total, exact(weight), epsilon, precision, input_roundings=int(summing))
    sums = [Bounded(total, rounded(np.abs(total), precision))] if summing else []
    if operator.endswith("w8a8"):
        keywords["quant_dtype"] = torch.int8
        return Trial(keywords, partial(_quantized, normed, sums))
    return Trial(keywords, within(normed, *sums))


def _quantized(normed: Bounded, sums: list[Bounded], results: Any) -> str:
    """What is quantized is the norm within its slack, and a scale is good to float32."""
    if len(results) != 2 + len(sums):
        return f"gave {len(results)} results, not {2 + len(sums)}"
    integers, scale, *rest = results
    return quantized(integers, scale, normed) or "".join(map(distance, rest, sums))


def quantized(integers: Any, scale: Any, values: Bounded) -> str:
    """Whether `integers * scale` is each token of `values`, quantized; empty when it is."""
    if integers.dtype != torch.int8:
        return f"quantized to {integers.dtype}, not int8"
    steps = exact(scale).reshape(values.value.shape[:-1])
    if text := distance(scale.reshape(steps.shape), _scales(values)):
        return f"scale: {text}"
    step = steps[..., None]
    # Half a step, plus what float32 makes of a quotient of up to 127.
    slack = values.slack + step * (0.5 + LARGEST * 4 * FLOAT32.unit)
    return distance(integers.double().cpu() * torch.from_numpy(step), Bounded(values.value, slack))


def _scales(values: Bounded) -> Bounded:
    largest: Array = np.abs(values.value).max(-1) / LARGEST
    slack: Array = values.slack.max(-1) / LARGEST + largest * 4 * FLOAT32.unit + FLOAT32.tiny
    # Zeros stay zeros by any scale.
    return Bounded(largest, np.where(largest == 0, np.inf, slack))
