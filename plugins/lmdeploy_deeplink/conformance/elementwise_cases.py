"""Cases of the gated activation and of rotary embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from lmdeploy_deeplink.conformance import exact as formulas
from lmdeploy_deeplink.conformance.case import Case, Trial, within
from lmdeploy_deeplink.conformance.inputs import Inputs, exact
from lmdeploy_deeplink.conformance.precision import FLOATS, PRECISIONS

if TYPE_CHECKING:
    from lmdeploy_deeplink.operators.vendor import Vendor

# Of gate and up: with 60, exp overflows in either direction, and silu is all of its gate or all but vanishes.
SILU_SCALES = (1.0, 60.0, 1e-4)
SILU_SHAPES = ((1, 2), (1, 128), (7, 192), (2, 3, 1024), (0, 64), (16, 3072))
# Tokens, query heads, KV heads, size of a head, size that turns.
ROTARY = (
    (1, 1, 1, 64, 64),
    (5, 4, 2, 64, 64),
    (7, 9, 3, 64, 64),
    (3, 8, 1, 128, 128),
    (4, 4, 4, 80, 80),
    (6, 4, 2, 128, 64),
    (2, 2, 2, 96, 32),
    (0, 4, 2, 64, 64),
    (33, 2, 1, 256, 256),
)
# How far into a sequence the tokens are. Angles of far positions are large before they are reduced.
POSITIONS = (0, 1000, 100_000)


def cases() -> Iterator[Case]:
    for dtype in FLOATS:
        for shape in SILU_SHAPES:
            for scale in SILU_SCALES:
                yield _silu(dtype, shape, -1, scale)
        yield _silu(dtype, (6, 128), 0, 1.0)
        yield _silu(dtype, (4, 6, 64), 1, 1.0)
        for shape5 in ROTARY:
            for position in POSITIONS:
                yield _rotary(dtype, shape5, position, strided=False)
            yield _rotary(dtype, shape5, 17, strided=True)


def _silu(dtype: str, shape: tuple[int, ...], dim: int, scale: float) -> Case:
    name = f"silu_and_mul {dtype} {'x'.join(map(str, shape))} along {dim} values {scale:g}"

    def make(vendor: Vendor) -> Trial:
        x = Inputs(name, dtype, vendor.device).normal(*shape, scale=scale)
        gate, up = np.split(exact(x), 2, dim)
        return Trial({"input_tensor": x, "dim": dim}, within(formulas.silu_and_mul(gate, up, PRECISIONS[dtype])))

    return Case("silu_and_mul", dtype, name, make)


def _rotary(dtype: str, shape: tuple[int, int, int, int, int], position: int, *, strided: bool) -> Case:
    tokens, heads, kv_heads, size, turning = shape
    name = f"apply_rotary_pos_emb {dtype} T{tokens} Hq{heads} Hkv{kv_heads} D{size} R{turning} from {position}"
    name += " strided" * strided
    return Case("apply_rotary_pos_emb", dtype, name, partial(_turn, name, dtype, shape, position, strided))


def _turn(
    name: str, dtype: str, shape: tuple[int, int, int, int, int], position: int, strided: bool, vendor: Vendor
) -> Trial:
    tokens, heads, kv_heads, size, turning = shape
    inputs, precision = Inputs(name, dtype, vendor.device), PRECISIONS[dtype]
    if strided:  # as cut out of the projection of q, k and v
        both = inputs.normal(tokens, heads + 2 * kv_heads, size)
        query, key = both[:, :heads], both[:, heads : heads + kv_heads]
    else:
        query, key = inputs.normal(tokens, heads, size), inputs.normal(tokens, kv_heads, size)
    rates = 10000.0 ** (-np.arange(0, turning, 2) / turning)
    angles = np.tile(np.outer(np.arange(tokens) + position, rates), 2)
    cos, sin = inputs.of(np.cos(angles)), inputs.of(np.sin(angles))
    turned = [formulas.rotary(exact(states), exact(cos), exact(sin), precision) for states in (query, key)]
    return Trial({"query": query, "key": key, "cos": cos, "sin": sin}, within(*turned))
