"""The seeded faults, and a program for an engine's Python that puts one after the other through the suite.

Prints {fault: {"failed": how many cases, "of": how many cases its operator has, "why": the first failure}}.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from seeded import SEEDED
from torch import Tensor
from torch.nn.functional import linear, silu

from lmdeploy_deeplink import reference
from lmdeploy_deeplink.conformance.run import run
from lmdeploy_deeplink.conformance.suite import cases
from lmdeploy_deeplink.operators.vendor import Vendor

RIGHT = reference.load().operators
Keywords = dict[str, Any]


def squares_in_the_element_type(hidden_states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    x = hidden_states
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + epsilon) * weight


def epsilon_underflows(hidden_states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    small = float(torch.tensor(epsilon, dtype=torch.float16))
    return RIGHT.rms_norm(hidden_states=hidden_states, weight=weight, epsilon=small)


def norm_before_the_sum(hidden_states: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Any:
    normed = RIGHT.rms_norm(hidden_states=hidden_states, weight=weight, epsilon=epsilon)
    return normed + residual, hidden_states + residual


def residual_not_added(**told: Any) -> Any:
    return RIGHT.add_rms_norm(**told)[0], told["residual"]


def halves_exchanged(input_tensor: Tensor, dim: int) -> Tensor:
    up, gate = input_tensor.float().chunk(2, dim)
    return (silu(gate) * up).to(input_tensor.dtype)


def wrong_rope_half(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return RIGHT.apply_rotary_pos_emb(query=query, key=key, cos=cos, sin=-sin)


def neighbours_paired(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
    half = cos.shape[-1] // 2
    cos, sin = cos.unsqueeze(1)[..., :half], sin.unsqueeze(1)[..., :half]
    turned = []
    for heads in (query, key):
        even, odd = heads[..., 0 : 2 * half : 2], heads[..., 1 : 2 * half : 2]
        pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
        turned.append(torch.cat((pairs, heads[..., 2 * half :]), -1))
    return turned


def all_of_the_head_turned(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
    turned = RIGHT.apply_rotary_pos_emb(query=query, key=key, cos=cos, sin=sin)
    for heads in turned:
        heads[..., cos.shape[-1] :] *= 0.5
    return turned


def _slow_paged(hidden: Callable[[int, int], Tensor]) -> Callable[..., Tensor]:
    """Paged prefill with another mask: `hidden(new, total)`."""

    def attend(**told: Any) -> Tensor:
        start = 0
        for row, new, total in zip(
            told["block_table"], told["q_seq_len"].tolist(), told["kv_seq_len"].tolist(), strict=True
        ):
            keys, values = (told[f"{side}_cache"][row.long()].flatten(0, 1)[:total] for side in ("key", "value"))
            query = told["query"][start : start + new]
            out = _plain(query, keys, values, hidden(new, total), told["softmax_scale"])
            told["attn_output"][start : start + new] = out
            start += new
        return told["attn_output"]

    return attend


def _plain(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, scale: float | None) -> Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = (side.float().repeat_interleave(group, 1) for side in (key, value))
    logits = torch.einsum("qhd,khd->hqk", query.float(), key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if hidden is not None:
        logits = logits.masked_fill(hidden, -math.inf)
    return torch.einsum("hqk,khd->qhd", logits.softmax(-1), value)


def _ones(new: int, total: int) -> Tensor:
    return torch.ones(new, total, dtype=torch.bool)


mask_off_by_one = _slow_paged(lambda new, total: _ones(new, total).triu(total - new + 2))
mask_from_the_left = _slow_paged(lambda new, total: _ones(new, total).triu(1))


def sequences_run_together(**told: Any) -> Tensor:
    out = told["attn_output"]
    hidden = _ones(len(out), len(out)).triu(1) if told["attn_mask"] else None
    out.copy_(_plain(told["query"], told["key"], told["value"], hidden, told["softmax_scale"]))
    return out


def _by_sequence(attend: Callable[[Tensor, Tensor, Tensor, Tensor | None, float | None], Tensor]) -> Any:
    def whole(**told: Any) -> Tensor:
        start = 0
        for length in told["q_seq_len"].tolist():
            rows = slice(start, start + length)
            hidden = _ones(length, length).triu(1) if told["attn_mask"] else None
            q, k, v = (told[side][rows] for side in ("query", "key", "value"))
            told["attn_output"][rows] = attend(q, k, v, hidden, told["softmax_scale"])
            start += length
        return told["attn_output"]

    return whole


def _powers(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, scale: float | None) -> Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = (side.float().repeat_interleave(group, 1) for side in (key, value))
    logits = torch.einsum("qhd,khd->hqk", query.float(), key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    powers = logits.exp()
    if hidden is not None:
        powers = powers.masked_fill(hidden, 0.0)
    return torch.einsum("hqk,khd->qhd", powers / powers.sum(-1, keepdim=True), value)


no_largest_taken_off = _by_sequence(_powers)
scale_ignored = _by_sequence(lambda query, key, value, hidden, _: _plain(query, key, value, hidden, None))


def output_written_too_early(**told: Any) -> Tensor:
    """Where the output lies over the query, the query is gone when it is read."""
    out = told["attn_output"]
    RIGHT.prefill_attention(**told)
    if out.data_ptr() == told["query"].data_ptr():
        RIGHT.prefill_attention(**told)
    return out


def last_token_missed(**told: Any) -> Tensor:
    return RIGHT.paged_decode_attention(**{**told, "kv_seq_len": (told["kv_seq_len"] - 1).clamp(min=1)})


def heads_dealt_out_in_turn(**told: Any) -> Tensor:
    heads, kv_heads = told["num_q_heads"], told["num_kv_heads"]
    order = torch.arange(heads).reshape(-1, kv_heads).T.flatten()
    out = told["attn_output"]
    turned = RIGHT.paged_decode_attention(
        **{**told, "query": told["query"][:, order], "attn_output": torch.empty_like(out)}
    )
    out.copy_(turned[:, order.argsort()])
    return out


def blocks_taken_in_order(**told: Any) -> Tensor:
    table = told["block_table"]
    return RIGHT.paged_decode_attention(
        **{**told, "block_table": torch.arange(table.numel(), dtype=table.dtype).reshape(table.shape)}
    )


def stale_slots_read(**told: Any) -> Tensor:
    size = told["block_size"]
    return RIGHT.paged_decode_attention(**{**told, "kv_seq_len": -(-told["kv_seq_len"] // size) * size})


def slot_off_by_one(**told: Any) -> Any:
    return RIGHT.fill_kv_cache(**{**told, "kv_indices": told["kv_indices"] + 1})


def values_not_written(**told: Any) -> Any:
    RIGHT.fill_kv_cache(**{**told, "value_cache": told["value_cache"].clone()})
    return told["key_cache"], told["value_cache"]


def zero_point_added(**told: Any) -> Any:
    pairs = {
        side: [told[side][0], -told[side][1]] for side in ("k_scales_zeros", "v_scales_zeros") if told["quant_bits"]
    }
    return RIGHT.fill_kv_cache(**{**told, **pairs})


def weights_renormalized(**told: Any) -> Any:
    weights, experts = RIGHT.moe_gating_topk_softmax(**told)
    return weights / weights.sum(-1, keepdim=True), experts


def experts_of_the_first_token(**told: Any) -> Tensor:
    return RIGHT.fused_moe(**{**told, "topk_ids": told["topk_ids"][:1].expand_as(told["topk_ids"])})


def gate_and_up_exchanged(**told: Any) -> Tensor:
    gate, up = told["gate_up_weights"].chunk(2, 1)
    return RIGHT.fused_moe(**{**told, "gate_up_weights": torch.cat((up, gate), 1)})


def sum_in_the_element_type(x: Tensor, weight: Tensor, bias: Tensor | None, **_: Any) -> Tensor:
    if x.dtype == torch.float32 or x.numel() == 0:
        return linear(x, weight, bias)
    total = torch.zeros(*x.shape[:-1], weight.shape[0], dtype=x.dtype)
    for step in range(0, x.shape[-1], 16):
        total = total + linear(x[..., step : step + 16], weight[:, step : step + 16])
    return total if bias is None else total + bias


def groups_transposed(**told: Any) -> Tensor:
    if told["group_size"]:
        told["scale"] = told["scale"].roll(1, 0)
    return RIGHT.weight_quant_matmul(**told)


def truncated(x: Tensor, **_: Any) -> Any:
    _, scale = RIGHT.dynamic_quant(x=x, quant_dtype=torch.int8, quant_granularity="PER_TOKEN")
    divisor = torch.where(scale == 0, torch.ones_like(scale), scale).unsqueeze(-1)
    return (x.float() / divisor).trunc().clamp(-128, 127).to(torch.int8), scale


def one_scale_for_all(x: Tensor, **_: Any) -> Any:
    if x.numel() == 0:
        return RIGHT.dynamic_quant(x=x, quant_dtype=torch.int8, quant_granularity="PER_TOKEN")
    scale = (x.float().abs().max() / 127).clamp(min=1e-30)
    return (x.float() / scale).round().to(torch.int8), scale.expand(x.shape[:-1])


def scales_exchanged(**told: Any) -> Tensor:
    bias, told["bias"] = told["bias"], None
    out = RIGHT.linear_w8a8(**told)
    return out if bias is None else out + (bias * told["linear_scale"]).to(out.dtype)


def rows_not_padded(**told: Any) -> Tensor:
    right = RIGHT.transdata(**told)
    return right.transpose(1, 2).reshape(right.shape)


def main() -> None:
    there = reference.load()
    every = list(cases())
    found: dict[str, Any] = {}
    for name, (operator, _) in SEEDED.items():
        faulty: Vendor = there.replaced(**{operator: globals()[name]})
        concerned = [case for case in every if case.operator == operator]
        failed = [outcome for outcome in run(faulty, concerned) if outcome.result == "failed"]
        found[name] = {
            "failed": len(failed),
            "of": len(concerned),
            "why": f"{failed[0].case}: {failed[0].why}" if failed else "",
        }
    json.dump(found, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
