"""Cases of writing into caches: what is written is compared bit by bit, and so is every slot that is not."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lmdeploy_deeplink.conformance import exact as formulas
from lmdeploy_deeplink.conformance.case import Case, Trial, distance, within
from lmdeploy_deeplink.conformance.inputs import TYPES, Inputs, exact
from lmdeploy_deeplink.conformance.paged import STALE, Paged, paged, place
from lmdeploy_deeplink.conformance.precision import FLOATS, Bounded, exactly, summed

if TYPE_CHECKING:
    from lmdeploy_deeplink.operators.vendor import Vendor

LENGTHS = ((1,), (16,), (17, 1, 5), (64, 33), (0,))
BLOCKS = (16, 64)
# KV heads, sizes of keys and of values.
HEADS = ((2, (64, 64)), (1, (128, 128)), (3, (80, 48)))


def cases() -> Iterator[Case]:
    for dtype in FLOATS:
        for lengths in LENGTHS:
            for size in BLOCKS:
                for heads in HEADS:
                    yield _filling(dtype, lengths, size, heads, pool=False, bits=0)
            yield _filling(dtype, lengths, 16, HEADS[0], pool=True, bits=0)
            yield _filling(dtype, lengths, 16, HEADS[0], pool=False, bits=8)
        for batch, before, after in ((1, 5, 1), (2, 7, 4), (1, 0, 3), (3, 4, 0)):
            name = f"fill_contiguous_kvcache {dtype} B{batch} S{before} and {after}"
            make = partial(_append, name, dtype, batch, before, after)
            yield Case("fill_contiguous_kvcache", dtype, name, make)
            name = f"get_cache_len {dtype} B{batch} S{before}"
            yield Case("get_cache_len", dtype, name, partial(_length, dtype, name, batch, before))
    for dtype in ("float16", "int8"):
        for shape in ((1, 1), (16, 32), (17, 33), (2, 5, 40), (3, 48, 64), (100, 7)):
            name = f"transdata {dtype} {'x'.join(map(str, shape))}"
            yield Case("transdata", dtype, name, partial(_strips, name, dtype, shape))


def _filling(
    dtype: str, lengths: tuple[int, ...], block_size: int, heads: tuple[int, tuple[int, int]], *, pool: bool, bits: int
) -> Case:
    words = " ".join(map(str, lengths))
    name = f"fill_kv_cache {dtype} of {words} blocks of {block_size} Hkv{heads[0]} D{heads[1][0]} Dv{heads[1][1]}"
    name += " in a pool" * pool + f" {bits} bits" * bool(bits)
    return Case("fill_kv_cache", dtype, name, partial(_fill, name, dtype, lengths, block_size, heads, pool, bits))


def _fill(
    name: str,
    dtype: str,
    lengths: tuple[int, ...],
    block_size: int,
    heads: tuple[int, tuple[int, int]],
    pool: bool,
    bits: int,
    vendor: Vendor,
) -> Trial:
    inputs = Inputs(name, dtype, vendor.device)
    made = paged(inputs, lengths, block_size, *heads, vendor.cache_axes, pool=pool, filled=False)
    caches = [made.key_cache, made.value_cache]
    pairs: list[list[torch.Tensor]] = [[], []]
    if bits:
        caches = [torch.full_like(cache, 99, dtype=TYPES["int8"]) for cache in caches]
        pairs = [[inputs.uniform(0.01, 0.05, heads[0], size), inputs.normal(heads[0], size)] for size in heads[1]]
    keywords = {
        "key": made.key,
        "value": made.value,
        "key_cache": caches[0],
        "value_cache": caches[1],
        "kv_indices": made.slots,
        "k_scales_zeros": pairs[0],
        "v_scales_zeros": pairs[1],
        "quant_bits": bits,
    }
    expected = [
        _filled(states, cache, made, pair, vendor.cache_axes, block_size)
        for states, cache, pair in zip((made.key, made.value), caches, pairs, strict=True)
    ]

    def wrong(results: Any) -> str:
        if len(results) != 2:
            return f"gave {len(results)} results, not 2"
        # In place: the caches that went in are what counts.
        return next(filter(None, map(distance, caches, expected)), "")

    return Trial(keywords, wrong)


def _filled(
    states: torch.Tensor, cache: torch.Tensor, made: Paged, pair: list[torch.Tensor], axes: str, block_size: int
) -> Bounded:
    value = np.full(tuple(cache.shape), 99.0 if pair else _as_stored(cache), np.float64)
    slack = np.zeros_like(value)
    view, loose = torch.from_numpy(value), torch.from_numpy(slack)
    tokens = exact(states)
    if pair:
        scale, zero = map(exact, pair)
        scaled = tokens / scale
        inside = (scaled - zero > -128) & (scaled - zero < 127)
        off = np.where(inside, 0.5 + summed(np.abs(scaled) + np.abs(zero), 2), 0.0)
        tokens = np.clip(scaled - zero, -128, 127)
    else:
        off = np.zeros_like(tokens)
    for number, slot in enumerate(made.slots.tolist()):
        place(view, axes, slot, block_size).copy_(torch.from_numpy(tokens[number]))
        place(loose, axes, slot, block_size).copy_(torch.from_numpy(off[number]))
    return Bounded(value, slack)


def _as_stored(cache: torch.Tensor) -> float:
    return float(torch.tensor(STALE, dtype=cache.dtype))


def _append(name: str, dtype: str, batch: int, before: int, after: int, vendor: Vendor) -> Trial:
    inputs = Inputs(name, dtype, vendor.device)
    names = ("key_cache", "value_cache", "key_state", "value_state")
    keywords = {
        each: inputs.normal(batch, count, 2, 32)
        for each, count in zip(names, (before, before, after, after), strict=True)
    }
    both = [
        exactly(np.concatenate([exact(keywords[f"{side}_cache"]), exact(keywords[f"{side}_state"])], 1))
        for side in ("key", "value")
    ]
    return Trial(keywords, within(*both))


def _length(dtype: str, name: str, batch: int, before: int, vendor: Vendor) -> Trial:
    cache = Inputs(name, dtype, vendor.device).normal(batch, before, 2, 32)
    return Trial({"cache": cache}, lambda result: "" if result == before else f"gave {result}, not {before}")


def _strips(name: str, dtype: str, shape: tuple[int, ...], vendor: Vendor) -> Trial:
    inputs = Inputs(name, dtype, vendor.device)
    x = inputs.int8(*shape) if dtype == "int8" else inputs.normal(*shape)
    values = exact(x)
    return Trial(
        {"hidden_states": x, "transdata_type": 2},
        within(formulas.strips(values if values.ndim == 3 else values[None], 32 if dtype == "int8" else 16)),
    )
