"""Norms, activations, rotary embeddings, products and experts in float64, from their formulas, with their bounds."""

from __future__ import annotations

import numpy as np

from lmdeploy_deeplink.conformance.precision import (
    SMALLEST_NORMAL,
    Array,
    Bounded,
    Precision,
    bounded,
    exactly,
    rounded,
    summed,
)


def rms_norm(x: Array, weight: Array, epsilon: float, precision: Precision, *, input_roundings: int = 0) -> Bounded:
    """Rounded twice: the normalized value, and its product with the weight.

    `input_roundings` is how often `x` itself, a sum, may have been rounded: once in place and once within the mean.
    """
    value = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + epsilon) * weight
    made = bounded(value, precision, roundings=2 + 2 * input_roundings, magnitude=np.abs(value), terms=x.shape[-1])
    # Where the normalized value is below the smallest that the element type has.
    return Bounded(made.value, made.slack + rounded(0.0, precision) * np.abs(weight))


def added(x: Array, residual: Array, precision: Precision) -> Bounded:
    value = x + residual
    return bounded(value, precision, roundings=1, magnitude=np.abs(value))


def silu_and_mul(gate: Array, up: Array, precision: Precision) -> Bounded:
    """Rounded twice: the activation, and its product. It may be 0 where exp overflows, or its inverse is no normal."""
    activated = _silu(gate)
    value = activated * up
    made = bounded(value, precision, roundings=2, magnitude=np.abs(value))
    return Bounded(value, made.slack + (rounded(0.0, precision) + np.abs(gate) * SMALLEST_NORMAL) * np.abs(up))


def _silu(x: Array) -> Array:
    # exp of a magnitude: neither side of it overflows.
    small = np.exp(-np.abs(x))
    activated: Array = np.where(x >= 0, x / (1 + small), x * small / (1 + small))
    return activated


def rotary(heads: Array, cos: Array, sin: Array, precision: Precision) -> Bounded:
    """`heads` [T, H, D], `cos` and `sin` [T, R]. Each product is rounded, and their sum."""
    size = cos.shape[-1]
    half = size // 2
    value, slack = heads.copy(), np.zeros_like(heads)
    for element in range(size):
        low = element < half
        other = element + half if low else element - half
        mine = heads[..., element] * cos[:, None, element]
        theirs = heads[..., other] * sin[:, None, element] * (-1 if low else 1)
        value[..., element] = mine + theirs
        magnitude = np.abs(mine) + np.abs(theirs)
        slack[..., element] = rounded(magnitude, precision, 2) + summed(magnitude, 2)
    return Bounded(value, slack)


def linear(x: Array, weight: Array, bias: Array | None, precision: Precision) -> Bounded:
    """`weight` [N, K]. Rounded as a product, and again with the bias."""
    product, magnitude = x @ weight.T, np.abs(x) @ np.abs(weight).T
    value = product if bias is None else product + bias
    slack = rounded(np.abs(product), precision) + summed(magnitude, x.shape[-1]) + rounded(np.abs(value), precision)
    return Bounded(value, slack)


def weight_quant_matmul(
    x: Array, quantized: Array, scale: Array, offset: Array | None, bias: Array | None, group: int, precision: Precision
) -> Bounded:
    """`quantized` [K, N]; `scale` and `offset` [N] or [K / group, N]. The weight may be rounded when it is unpacked."""
    if group:
        scale = np.repeat(scale, group, 0)
        offset = None if offset is None else np.repeat(offset, group, 0)
    weight = (quantized if offset is None else quantized + offset) * scale
    made = linear(x, weight.T, bias, precision)
    return Bounded(made.value, made.slack + rounded(np.abs(x) @ np.abs(weight), precision, 2))


def linear_w8a8(
    a: Array, b: Array, row_scale: Array, column_scale: Array, bias: Array | None, precision: Precision
) -> Bounded:
    """Integers multiply and add exactly; what follows is rounded, again with the bias."""
    product = (a @ b.T) * row_scale[:, None] * column_scale
    value = product if bias is None else product + bias
    magnitude = np.abs(product) + np.abs(value)
    return Bounded(value, rounded(magnitude, precision) + summed(magnitude, 4))


def gating(logits: Array, precision: Precision) -> Bounded:
    """The probabilities of all experts [T, E]. An error in a logit is a relative error of e to its power."""
    shifted = logits - logits.max(-1, keepdims=True)
    powers = np.exp(shifted)
    value = powers / powers.sum(-1, keepdims=True)
    slack = summed(value, logits.shape[-1]) + summed(value * np.abs(shifted), 2) + rounded(value, precision)
    return Bounded(value, slack)


def fused_moe(
    x: Array,
    gate_up: Array,
    down: Array,
    weights: Array,
    experts: Array,
    renormalize: bool,
    precision: Precision,
) -> Bounded:
    """`x` [T, H], `gate_up` [E, 2 I, H], `down` [E, H, I], `weights` and `experts` [T, K].

    Rounded: gate, up, the activation and its product, the way down, each weighted part, and their sum.
    """
    value, slack = np.zeros_like(x), np.zeros_like(x)
    half = gate_up.shape[1] // 2
    for token, row in enumerate(x):
        share = weights[token] / weights[token].sum() if renormalize else weights[token]
        for part, expert in zip(share, experts[token].astype(int), strict=True):
            both = linear(row[None], gate_up[expert], None, precision)
            gate, up = both.value[0, :half], both.value[0, half:]
            activated = _silu(gate)
            # The slope of silu is at most 1.1.
            off = 1.1 * both.slack[0, :half] * np.abs(up) + np.abs(activated) * both.slack[0, half:]
            act = activated * up
            off += rounded(np.abs(act), precision, 2) + summed(np.abs(act), 0)
            out = linear(act[None], down[expert], None, precision)
            value[token] += part * out.value[0]
            slack[token] += np.abs(part) * (out.slack[0] + np.abs(down[expert]) @ off)
            slack[token] += rounded(np.abs(part * out.value[0]), precision, 2) + summed(np.abs(part * out.value[0]), 8)
    return Bounded(value, slack + rounded(np.abs(value), precision))


def strips(matrices: Array, strip: int) -> Bounded:
    """[B, M, N] -> [B, ceil(N / strip), ceil(M / 16) 16, strip], from where each element goes."""
    count, rows, columns = matrices.shape
    out = np.zeros((count, -(-columns // strip), -(-rows // 16) * 16, strip))
    for column in range(columns):
        out[:, column // strip, :rows, column % strip] = matrices[:, :, column]
    return exactly(out)
