"""Attention in float64, one query and one head at a time, with its bound."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lmdeploy_deeplink.conformance.precision import Array, Bounded, Precision, rounded, summed


def attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    causal: bool,
    scale: float,
    slopes: Sequence[float] | None,
    precision: Precision,
) -> Bounded:
    """One sequence: `query` [new, Hq, D] of its last tokens, `key` [total, Hkv, D], `value` [total, Hkv, Dv].

    Logits and softmax are in float32; the probabilities may be rounded to the element type before they meet the values,
    and the result is. A logit that is off by d makes its probability off by a factor of at most about 1 + 2 d.
    """
    new, heads, size = query.shape
    total, kv_heads = key.shape[:2]
    out, slack = (np.zeros((new, heads, value.shape[-1])) for _ in range(2))
    for head in range(heads):
        source = head // (heads // kv_heads)
        keys, values = key[:, source], value[:, source]
        for row in range(new):
            position = total - new + row
            seen = position + 1 if causal else total
            logits = keys[:seen] @ query[row, head] * scale
            reach = np.abs(keys[:seen]) @ np.abs(query[row, head]) * abs(scale)
            if slopes is not None:
                bias = slopes[head] * (np.arange(seen) - position)
                logits, reach = logits + bias, reach + np.abs(bias)
            powers = np.exp(logits - logits.max())
            shares = powers / powers.sum()
            off = summed(reach, size).max() * 2
            magnitude = shares @ np.abs(values[:seen])
            out[row, head] = shares @ values[:seen]
            slack[row, head] = magnitude * off + rounded(magnitude, precision) + summed(magnitude, seen)
    return Bounded(out, slack + rounded(np.abs(out), precision))
