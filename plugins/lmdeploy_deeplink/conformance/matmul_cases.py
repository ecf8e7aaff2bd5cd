"""Cases of the matrix products, and of quantization."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lmdeploy_deeplink.conformance import exact as formulas
from lmdeploy_deeplink.conformance.case import Case, Trial, within
from lmdeploy_deeplink.conformance.inputs import TYPES, Inputs, exact
from lmdeploy_deeplink.conformance.norm_cases import quantized
from lmdeploy_deeplink.conformance.precision import FLOATS, PRECISIONS, exactly

if TYPE_CHECKING:
    from lmdeploy_deeplink.operators.vendor import Vendor

# Tokens, K, N. Long sums of values of one sign are what a sum in 16 bits gets wrong.
SHAPES = ((1, 1, 1), (1, 64, 32), (5, 576, 192), (3, 4096, 16), (0, 64, 32), (17, 96, 80))
MEANS = (0.0, 1.0)


def cases() -> Iterator[Case]:
    for dtype in FLOATS:
        for shape in SHAPES:
            for mean in MEANS:
                for bias in (False, True):
                    name = f"linear {dtype} {_words(shape)} mean {mean:g}{' bias' * bias}"
                    yield Case("linear", dtype, name, partial(_linear, name, dtype, shape, mean, bias))
        for shape in SHAPES[1:]:
            for group in (0, 32):
                for offset in (False, True):
                    name = f"weight_quant_matmul {dtype} {_words(shape)} group {group}{' offset' * offset}"
                    yield Case("weight_quant_matmul", dtype, name, partial(_weights, name, dtype, shape, group, offset))
            for bias in (False, True):
                name = f"linear_w8a8 {dtype} {_words(shape)}{' bias' * bias}"
                yield Case("linear_w8a8", dtype, name, partial(_w8a8, name, dtype, shape, bias))
        for rows in ((1, 64), (7, 96), (2, 3, 128), (0, 64), (3, 4096)):
            for scale in (1.0, 1e-3, 300.0, 0.0):
                name = f"dynamic_quant {dtype} {'x'.join(map(str, rows))} values {scale:g}"
                yield Case("dynamic_quant", dtype, name, partial(_quantize, name, dtype, rows, scale))


def _words(shape: tuple[int, int, int]) -> str:
    return f"T{shape[0]} K{shape[1]} N{shape[2]}"


def _linear(name: str, dtype: str, shape: tuple[int, int, int], mean: float, bias: bool, vendor: Vendor) -> Trial:
    tokens, depth, width = shape
    inputs = Inputs(name, dtype, vendor.device)
    x, weight = inputs.normal(tokens, depth, mean=mean), inputs.normal(width, depth, mean=mean)
    add = inputs.normal(width) if bias else None
    keywords = {"x": x, "weight": weight, "bias": add, "all_reduce": False, "group": ""}
    value = formulas.linear(exact(x), exact(weight), None if add is None else exact(add), PRECISIONS[dtype])
    return Trial(keywords, within(value))


def _weights(name: str, dtype: str, shape: tuple[int, int, int], group: int, offset: bool, vendor: Vendor) -> Trial:
    tokens, depth, width = shape
    inputs = Inputs(name, dtype, vendor.device)
    rows = (depth // group, width) if group else (width,)
    x, packed = inputs.normal(tokens, depth), inputs.int8(depth, width)
    scale = inputs.uniform(0.001, 0.01, *rows)
    zero = inputs.of(np.round(exact(inputs.normal(*rows, scale=10)))) if offset else None
    bias = inputs.normal(width)
    keywords = {"x1": x, "x2": packed, "scale": scale, "offset": zero, "bias": bias}
    keywords |= {"all_reduce": False, "group_size": group}
    value = formulas.weight_quant_matmul(
        exact(x),
        exact(packed),
        exact(scale),
        None if zero is None else exact(zero),
        exact(bias),
        group,
        PRECISIONS[dtype],
    )
    return Trial(keywords, within(value))


def _w8a8(name: str, dtype: str, shape: tuple[int, int, int], bias: bool, vendor: Vendor) -> Trial:
    tokens, depth, width = shape
    inputs = Inputs(name, dtype, vendor.device)
    a, b = inputs.int8(tokens, depth), inputs.int8(width, depth)
    rows = inputs.float32(np.linspace(0.001, 0.02, tokens))
    columns = inputs.float32(np.linspace(0.02, 0.001, width))
    add = inputs.normal(width) if bias else None
    keywords: dict[str, Any] = {"a": a, "b": b, "rms_scale": rows, "linear_scale": columns}
    keywords |= {"out_dtype": TYPES[dtype], "quant_dtype": torch.int8, "bias": add}
    value = formulas.linear_w8a8(
        exact(a), exact(b), exact(rows), exact(columns), None if add is None else exact(add), PRECISIONS[dtype]
    )
    return Trial(keywords, within(value))


def _quantize(name: str, dtype: str, shape: tuple[int, ...], scale: float, vendor: Vendor) -> Trial:
    x = Inputs(name, dtype, vendor.device).normal(*shape, scale=scale)
    values = exactly(exact(x))

    def wrong(results: Any) -> str:
        if len(results) != 2:
            return f"gave {len(results)} results, not 2"
        integers, scale = results
        return quantized(integers, scale, values)

    return Trial({"x": x, "quant_dtype": torch.int8, "quant_granularity": "PER_TOKEN"}, wrong)
