"""Attention, one sequence after the other, in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from deeplink.errors import UnsupportedOperator

if TYPE_CHECKING:
    from torch import Tensor


def prefill_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    q_start_loc: Tensor,
    q_seq_len: Tensor,
    kv_seq_len: Tensor,
    max_q_seq_len: int,
    num_q_heads: int,
    num_kv_heads: int,
    attn_mask: Sequence[Tensor | None],
    softmax_scale: float | None,
    alibi_slopes: Sequence[float] | None,
    attn_output: Tensor,
) -> Tensor:
    causal = q_start_loc.shape[0] == q_seq_len.shape[0] + 1
    starts, lengths = q_start_loc.tolist(), q_seq_len.tolist()
    parts = []
    for start, length in zip(starts, lengths, strict=False):
        rows = slice(start, start + length)
        hidden = _future(length, length, query.device) if causal else None
        parts.append(_attend(query[rows], key[rows], value[rows], hidden, softmax_scale, alibi_slopes))
    return _written(attn_output, parts)


def paged_prefill_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    block_size: int,
    q_start_loc: Tensor,
    q_seq_len: Tensor,
    kv_seq_len: Tensor,
    cu_seq_lens_kv: Tensor,
    max_q_seq_len: int,
    max_kv_seq_len: int,
    num_q_heads: int,
    num_kv_heads: int,
    attn_mask: Sequence[Tensor | None],
    softmax_scale: float | None,
    alibi_slopes: Sequence[float] | None,
    attn_output: Tensor,
    kv_scales: Tensor | None,
    kv_zeros: Tensor | None,
    quant_bits: int,
) -> Tensor:
    _plain_cache(quant_bits, "paged_prefill_attention")
    bounds = pairwise(q_start_loc.tolist())
    parts = []
    for row, (start, end), total in zip(block_table, bounds, kv_seq_len.tolist(), strict=True):
        keys, values = (_read(cache, row, total) for cache in (key_cache, value_cache))
        hidden = _future(end - start, total, query.device)
        parts.append(_attend(query[start:end], keys, values, hidden, softmax_scale, alibi_slopes))
    return _written(attn_output, parts)


def paged_decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    block_size: int,
    q_seq_len: Tensor,
    kv_seq_len: Tensor,
    max_kv_seq_len: int,
    num_q_heads: int,
    num_kv_heads: int,
    softmax_scale: float | None,
    alibi_slopes: Sequence[float] | None,
    attn_output: Tensor,
    kv_scales: Tensor | None,
    kv_zeros: Tensor | None,
    quant_bits: int,
) -> Tensor:
    _plain_cache(quant_bits, "paged_decode_attention")
    parts = []
    for new, row, total in zip(query.split(1), block_table, kv_seq_len.tolist(), strict=True):
        keys, values = (_read(cache, row, total) for cache in (key_cache, value_cache))
        parts.append(_attend(new, keys, values, None, softmax_scale, alibi_slopes))
    return _written(attn_output, parts)


def incre_flash_attention(
    query: Tensor, key: Tensor, value: Tensor, num_heads: int, input_layout: str, softmax_scale: float | None
) -> Tensor:
    if input_layout not in ("BSH", "BSND"):
        raise UnsupportedOperator(
            f"tensors in the order {input_layout} are not read here",
            field="incre_flash_attention.input_layout",
            theirs=input_layout,
            remedy="BSH and BSND are",
        )
    heads = [states.reshape(*states.shape[:2], num_heads, -1) for states in (query, key, value)]
    parts = [_attend(q, k, v, None, softmax_scale, None) for q, k, v in zip(*heads, strict=True)]
    return torch.stack(parts).to(query.dtype).reshape(query.shape)


def fused_attention(
    query_states: Tensor, key_states: Tensor, value_states: Tensor, mask: Sequence[Tensor | None]
) -> Tensor:
    query, key, value = query_states.squeeze(0), key_states.squeeze(0), value_states.squeeze(0)
    hidden = mask[0] if len(query) == len(key) else None
    return _attend(query, key, value, hidden, None, None).to(query.dtype)


def _read(cache: Tensor, blocks: Tensor, total: int) -> Tensor:
    """[total, Hkv, D]: what the blocks of one sequence hold. By index, so that a cache may be a strided view."""
    needed = -(-total // cache.shape[1])
    return cache[blocks[:needed].long()].flatten(0, 1)[:total]


def _future(new: int, total: int, device: torch.device) -> Tensor:
    """[new, total], True where a key comes after the query; the last query is at the last key."""
    return torch.ones(new, total, dtype=torch.bool, device=device).triu(total - new + 1)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden: Tensor | None,
    scale: float | None,
    slopes: Sequence[float] | None,
) -> Tensor:
    """[new, Hq, Dv] in float32. `query` [new, Hq, D], `key` [total, Hkv, D], `value` [total, Hkv, Dv]."""
    new, heads, size = query.shape
    total, kv_heads = key.shape[:2]
    group = heads // kv_heads
    query_HGND = query.float().reshape(new, kv_heads, group, size).permute(1, 2, 0, 3)
    key_HTD, value_HTD = key.float().transpose(0, 1), value.float().transpose(0, 1)
    logits_HGNT = query_HGND @ key_HTD.transpose(1, 2).unsqueeze(1) * (1 / math.sqrt(size) if scale is None else scale)
    if slopes is not None:
        positions = torch.arange(total, device=query.device)
        distance_NT = positions - positions[total - new :].unsqueeze(1)
        slopes_HG = torch.tensor(slopes, dtype=torch.float32, device=query.device).reshape(kv_heads, group, 1, 1)
        logits_HGNT = logits_HGNT + slopes_HG * distance_NT
    if hidden is not None:
        logits_HGNT = logits_HGNT.masked_fill(hidden, -math.inf)
    out_HGND = logits_HGNT.softmax(-1) @ value_HTD.unsqueeze(1)
    return out_HGND.permute(2, 0, 1, 3).reshape(new, heads, value.shape[-1])


def _written(attn_output: Tensor, parts: list[Tensor]) -> Tensor:
    """All is computed before anything is written: the output may be the memory of the query."""
    if parts:
        attn_output.copy_(torch.cat(parts))
    return attn_output


def _plain_cache(quant_bits: int, name: str) -> None:
    if quant_bits:
        raise UnsupportedOperator(
            f"{name} reads no caches of {quant_bits} bits", field=f"{name}.quant_bits", theirs=str(quant_bits)
        )
