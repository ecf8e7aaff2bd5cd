"""Cases of attention, with and without a paged cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lmdeploy_deeplink.conformance.case import Case, Trial, within
from lmdeploy_deeplink.conformance.exact_attention import attention
from lmdeploy_deeplink.conformance.inputs import Inputs, exact
from lmdeploy_deeplink.conformance.paged import paged
from lmdeploy_deeplink.conformance.precision import FLOATS, PRECISIONS, Array, Bounded

if TYPE_CHECKING:
    from torch import Tensor

    from lmdeploy_deeplink.operators.vendor import Vendor

# Query heads, KV heads, size of a head, size of a value head.
HEADS = ((4, 4, 64, 64), (4, 2, 64, 64), (8, 1, 128, 128), (9, 3, 64, 64), (2, 2, 80, 80))
UNLIKE = (2, 1, 96, 64)
PREFILLS = ((1,), (5,), (16,), (7, 1, 12), (33,))
# New tokens and all tokens of each sequence: a first chunk, a later one, one token, and unlike ones together.
CHUNKS = (((5, 5),), ((4, 20),), ((1, 17),), ((16, 48), (3, 3), (1, 40)), ((17, 33),))
DECODES = ((1,), (16,), (17,), (5, 32, 1), (63, 64, 65, 66))
BLOCKS = (16, 64)
COMPRESSED_MASK = 2048


@dataclass(frozen=True, slots=True)
class Edge:
    """`scale` is what the operator is told, `large` what queries are multiplied with; the last three are of memory."""

    name: str = ""
    scale: float | None = None
    large: float = 1.0
    alibi: bool = False
    aliased: bool = False
    strided: bool = False
    pool: bool = False


PLAIN = Edge()
# Logits of some hundreds: exp overflows unless the largest is taken off first, and one key gets all the weight.
EDGES = (
    Edge("scale 0.3", scale=0.3),
    Edge("large logits", large=60.0),
    Edge("alibi", alibi=True),
    Edge("output over query", aliased=True),
    Edge("cut from qkv", strided=True),
)
PAGED_EDGES = (*EDGES, Edge("caches in a pool", pool=True))


def cases() -> Iterator[Case]:
    for dtype in FLOATS:
        for heads in (*HEADS, UNLIKE):
            for lengths in PREFILLS:
                for causal in (True, False):
                    yield _prefill(dtype, heads, lengths, causal, PLAIN)
            for block in BLOCKS:
                for chunks in CHUNKS:
                    yield _chunked(dtype, heads, chunks, block, PLAIN)
                for decodes in DECODES:
                    yield _decode(dtype, heads, decodes, block, PLAIN)
        for edge in EDGES:
            for heads in HEADS[1:4]:
                yield _prefill(dtype, heads, PREFILLS[3], True, edge)
        for edge in PAGED_EDGES:
            for heads in HEADS[1:4]:
                yield _chunked(dtype, heads, CHUNKS[3], 16, edge)
                yield _decode(dtype, heads, DECODES[3], 16, edge)
        for layout in ("BSH", "BSND"):
            for batch, total in ((1, 1), (2, 17), (3, 64)):
                for edge in (PLAIN, *EDGES[:2]):
                    yield _incremental(dtype, layout, batch, total, edge)
        for heads in HEADS[:3]:
            for new, total in ((1, 1), (9, 9), (1, 12)):
                yield _fused(dtype, heads, new, total)


def _words(heads: tuple[int, ...], edge: Edge) -> str:
    text = f"Hq{heads[0]} Hkv{heads[1]} D{heads[2]} Dv{heads[3]}"
    return f"{text} {edge.name}".rstrip()


def _prefill(dtype: str, heads: tuple[int, int, int, int], lengths: tuple[int, ...], causal: bool, edge: Edge) -> Case:
    words = " ".join(map(str, lengths))
    name = f"prefill_attention {dtype} of {words} {'causal' if causal else 'whole'} {_words(heads, edge)}"
    make = partial(_make_prefill, name, dtype, heads, lengths, causal, edge)
    return Case("prefill_attention", dtype, name, make)


def _make_prefill(
    name: str,
    dtype: str,
    heads: tuple[int, int, int, int],
    lengths: tuple[int, ...],
    causal: bool,
    edge: Edge,
    vendor: Vendor,
) -> Trial:
    query_heads, kv_heads, size, value_size = heads
    inputs, tokens = Inputs(name, dtype, vendor.device), sum(lengths)
    if edge.strided:
        whole = inputs.normal(tokens, query_heads + 2 * kv_heads, size)
        query, key, value = whole.split((query_heads, kv_heads, kv_heads), 1)
    else:
        query = inputs.normal(tokens, query_heads, size, scale=edge.large)
        key, value = inputs.normal(tokens, kv_heads, size), inputs.normal(tokens, kv_heads, value_size)
    starts = [0, *accumulate(lengths)]
    mask = torch.ones(max(lengths), max(lengths), dtype=torch.bool, device=vendor.device).triu(1)
    slopes = _slopes(query_heads) if edge.alibi else None
    empty = inputs.normal(0, 16, kv_heads, size)
    expected = [_expected(query[a:b], key[a:b], value[a:b], causal, edge, slopes, dtype) for a, b in pairwise(starts)]
    keywords = {
        "query": query,
        "key": key,
        "value": value,
        "key_cache": empty,
        "value_cache": empty,
        "q_start_loc": inputs.int32(starts if causal else starts[:-1]),
        "q_seq_len": inputs.int32(lengths),
        "kv_seq_len": inputs.int32(lengths),
        "max_q_seq_len": max(lengths),
        "num_q_heads": query_heads,
        "num_kv_heads": kv_heads,
        "attn_mask": [mask] if causal else [],
        "softmax_scale": edge.scale,
        "alibi_slopes": slopes,
    }
    return _filling(keywords, inputs, query, value_size, edge, expected)


def _chunked(
    dtype: str, heads: tuple[int, int, int, int], chunks: tuple[tuple[int, int], ...], block: int, edge: Edge
) -> Case:
    words = " ".join(f"{new}/{total}" for new, total in chunks)
    name = f"paged_prefill_attention {dtype} of {words} blocks of {block} {_words(heads, edge)}"
    make = partial(_make_paged, name, dtype, heads, chunks, block, edge)
    return Case("paged_prefill_attention", dtype, name, make)


def _decode(dtype: str, heads: tuple[int, int, int, int], totals: tuple[int, ...], block: int, edge: Edge) -> Case:
    words = " ".join(map(str, totals))
    name = f"paged_decode_attention {dtype} of {words} blocks of {block} {_words(heads, edge)}"
    chunks = tuple((1, total) for total in totals)
    make = partial(_make_paged, name, dtype, heads, chunks, block, edge)
    return Case("paged_decode_attention", dtype, name, make)


def _make_paged(
    name: str,
    dtype: str,
    heads: tuple[int, int, int, int],
    chunks: tuple[tuple[int, int], ...],
    block: int,
    edge: Edge,
    vendor: Vendor,
) -> Trial:
    query_heads, kv_heads, size, value_size = heads
    inputs = Inputs(name, dtype, vendor.device)
    news, totals = [new for new, _ in chunks], tuple(total for _, total in chunks)
    made = paged(inputs, totals, block, kv_heads, (size, value_size), vendor.cache_axes, pool=edge.pool)
    ends = list(accumulate(totals))
    fresh = [place for (new, _), end in zip(chunks, ends, strict=True) for place in range(end - new, end)]
    wide = query_heads * (3 if edge.strided else 1)
    query = inputs.normal(sum(news), wide, size, scale=edge.large)[:, :query_heads]
    slopes = _slopes(query_heads) if edge.alibi else None
    expected, row = [], 0
    for (new, total), end in zip(chunks, ends, strict=True):
        of_it = slice(end - total, end)
        part = query[row : row + new]
        expected.append(_expected(part, made.key[of_it], made.value[of_it], True, edge, slopes, dtype))
        row += new
    keywords: dict[str, Any] = {
        "query": query,
        "key_cache": made.key_cache,
        "value_cache": made.value_cache,
        "block_table": made.block_table,
        "block_size": block,
        "q_seq_len": inputs.int32(news),
        "kv_seq_len": inputs.int32(totals),
        "max_kv_seq_len": max(totals),
        "num_q_heads": query_heads,
        "num_kv_heads": kv_heads,
        "softmax_scale": edge.scale,
        "alibi_slopes": slopes,
        "kv_scales": None,
        "kv_zeros": None,
        "quant_bits": 0,
    }
    if name.startswith("paged_prefill"):
        side = COMPRESSED_MASK
        keywords |= {
            "key": made.key[fresh],
            "value": made.value[fresh],
            "q_start_loc": inputs.int32([0, *accumulate(news)]),
            "cu_seq_lens_kv": inputs.int32([0, *ends]),
            "max_q_seq_len": max(news),
            "attn_mask": [torch.ones(side, side, dtype=torch.bool, device=vendor.device).triu(1)],
        }
    return _filling(keywords, inputs, query, value_size, edge, expected)


def _expected(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, edge: Edge, slopes: Sequence[float] | None, dtype: str
) -> Bounded:
    scale = query.shape[-1] ** -0.5 if edge.scale is None else edge.scale
    return attention(
        exact(query),
        exact(key),
        exact(value),
        causal=causal,
        scale=scale,
        slopes=slopes,
        precision=PRECISIONS[dtype],
    )


def _slopes(heads: int) -> list[float]:
    return [float(2.0 ** (-8 * (head + 1) / heads)) for head in range(heads)]


def _filling(
    keywords: dict[str, Any],
    inputs: Inputs,
    query: Tensor,
    value_size: int,
    edge: Edge,
    expected: Sequence[Bounded],
) -> Trial:
    """The output is what was handed in to be filled, or the query's own memory."""
    if edge.aliased:
        keywords["attn_output"] = query[..., :value_size]
    else:
        keywords["attn_output"] = torch.full_like(inputs.normal(*query.shape[:-1], value_size), torch.nan)
    return Trial(keywords, within(_joined(expected)))


def _joined(parts: Sequence[Bounded]) -> Bounded:
    values: list[Array] = [part.value for part in parts]
    return Bounded(np.concatenate(values), np.concatenate([part.slack for part in parts]))


def _incremental(dtype: str, layout: str, batch: int, total: int, edge: Edge) -> Case:
    name = f"incre_flash_attention {dtype} {layout} N{batch} S{total} {edge.name}".rstrip()

    def make(vendor: Vendor) -> Trial:
        heads, size = 4, 64
        inputs = Inputs(name, dtype, vendor.device)
        query = inputs.normal(batch, 1, heads, size, scale=edge.large)
        key, value = (inputs.normal(batch, total, heads, size) for _ in range(2))
        parts = [_expected(query[n], key[n], value[n], False, edge, None, dtype) for n in range(batch)]
        shape = (batch, 1, heads, size) if layout == "BSND" else (batch, 1, heads * size)
        expected = Bounded(*(np.stack(side).reshape(shape) for side in _sides(parts)))
        tensors = {"query": query, "key": key, "value": value}
        if layout == "BSH":
            tensors = {side: states.flatten(2) for side, states in tensors.items()}
        told = {"num_heads": heads, "input_layout": layout, "softmax_scale": edge.scale or size**-0.5}
        return Trial({**tensors, **told}, within(expected))

    return Case("incre_flash_attention", dtype, name, make)


def _sides(parts: Sequence[Bounded]) -> tuple[list[Array], list[Array]]:
    return [part.value for part in parts], [part.slack for part in parts]


def _fused(dtype: str, heads: tuple[int, int, int, int], new: int, total: int) -> Case:
    name = f"fused_attention {dtype} of {new}/{total} {_words(heads, PLAIN)}"

    def make(vendor: Vendor) -> Trial:
        query_heads, kv_heads, size, _ = heads
        inputs = Inputs(name, dtype, vendor.device)
        query = inputs.normal(1, new, query_heads, size)
        key, value = (inputs.normal(1, total, kv_heads, size) for _ in range(2))
        mask = torch.ones(new, new, dtype=torch.bool, device=vendor.device).triu(1)
        expected = _expected(query[0], key[0], value[0], True, PLAIN, None, dtype)
        keywords = {"query_states": query, "key_states": key, "value_states": value, "mask": [mask]}
        return Trial(keywords, within(expected))

    return Case("fused_attention", dtype, name, make)
