"""Cases of routing and of mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from lmdeploy_deeplink.conformance import exact as formulas
from lmdeploy_deeplink.conformance.case import Case, Trial, distance, within
from lmdeploy_deeplink.conformance.inputs import Inputs, exact
from lmdeploy_deeplink.conformance.precision import FLOATS, PRECISIONS, Bounded

if TYPE_CHECKING:
    from lmdeploy_deeplink.operators.vendor import Vendor

# Tokens, experts, chosen.
GATES = ((1, 4, 1), (5, 8, 2), (16, 60, 4), (3, 128, 8), (2, 8, 8), (0, 8, 2))
# Of the logits; with 0 all experts are equal, with 40 exp overflows in 16 bits.
GATE_SCALES = (1.0, 40.0, 0.0)
# Tokens, experts, chosen, hidden size, size within an expert.
MIXTURES = ((1, 4, 1, 32, 48), (5, 8, 2, 64, 32), (9, 8, 4, 48, 96), (3, 16, 16, 32, 32), (0, 4, 2, 32, 32))


def cases() -> Iterator[Case]:
    for dtype in FLOATS:
        for gate in GATES:
            for scale in GATE_SCALES:
                name = f"moe_gating_topk_softmax {dtype} T{gate[0]} E{gate[1]} top {gate[2]} logits {scale:g}"
                yield Case("moe_gating_topk_softmax", dtype, name, partial(_gating, name, dtype, gate, scale))
        for mixture in MIXTURES:
            for renormalize in (False, True):
                for spread in ("any", "one"):
                    tokens, experts, topk, hidden, inner = mixture
                    name = f"fused_moe {dtype} T{tokens} E{experts} top {topk} H{hidden} I{inner} to {spread}"
                    name += " renormalized" * renormalize
                    make = partial(_mixture, name, dtype, mixture, renormalize, spread)
                    yield Case("fused_moe", dtype, name, make)


def _gating(name: str, dtype: str, gate: tuple[int, int, int], scale: float, vendor: Vendor) -> Trial:
    tokens, experts, topk = gate
    logits = Inputs(name, dtype, vendor.device).normal(tokens, experts, scale=scale)
    all_of_them = formulas.gating(exact(logits), PRECISIONS[dtype])
    keywords = {"router_logits": logits, "topk": topk, "moe_metadata": None}
    return Trial(keywords, partial(_chosen, all_of_them, topk))


def _chosen(every: Bounded, topk: int, results: Any) -> str:
    """The largest probabilities in order, each of the expert that is named; among equals any, but none twice."""
    weights, chosen = results
    order = np.argsort(-every.value, -1, kind="stable")[:, :topk]
    best = Bounded(*(np.take_along_axis(part, order, -1) for part in (every.value, every.slack)))
    if text := distance(weights, best):
        return f"weights: {text}"
    if tuple(chosen.shape) != best.value.shape or chosen.is_floating_point():
        return f"experts: {chosen.dtype} of shape {tuple(chosen.shape)}, not integers of {best.value.shape}"
    numbers = chosen.long().cpu().numpy()
    if numbers.size and (numbers.min() < 0 or numbers.max() >= every.value.shape[-1]):
        return "experts: a number that no expert has"
    if any(len(set(row)) != len(row) for row in numbers.tolist()):
        return "experts: one twice for the same token"
    named = Bounded(*(np.take_along_axis(part, numbers, -1) for part in (every.value, every.slack)))
    text = distance(weights, named)
    return text and f"experts: their probabilities are others; {text}"


def _mixture(
    name: str,
    dtype: str,
    mixture: tuple[int, int, int, int, int],
    renormalize: bool,
    spread: str,
    vendor: Vendor,
) -> Trial:
    tokens, experts, topk, hidden, inner = mixture
    inputs = Inputs(name, dtype, vendor.device)
    x = inputs.normal(tokens, hidden)
    gate_up = inputs.normal(experts, 2 * inner, hidden, scale=hidden**-0.5)
    down = inputs.normal(experts, hidden, inner, scale=inner**-0.5)
    first = inputs.shuffled(experts)
    # Either unlike experts for every token, or the same ones for all of them.
    ids = [[first[(k + t * (spread == "any")) % experts] for k in range(topk)] for t in range(tokens)]
    weights = inputs.float32(exact(inputs.uniform(0.05, 0.5, tokens, topk)))
    chosen = inputs.int32(np.reshape(ids, (tokens, topk)))
    keywords = {
        "hidden_states": x,
        "gate_up_weights": gate_up,
        "down_weights": down,
        "topk_weights": weights,
        "topk_ids": chosen,
        "topk": topk,
        "renormalize": renormalize,
        "moe_metadata": None,
    }
    value = formulas.fused_moe(
        exact(x), exact(gate_up), exact(down), exact(weights), exact(chosen), renormalize, PRECISIONS[dtype]
    )
    return Trial(keywords, within(value))
