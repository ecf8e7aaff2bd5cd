"""Compiled: digest a chunk where it lies in the blocks, a slice at a time, which is gathered but stays in the cache.

So the bytes are read from memory once, and written nowhere. Needs numba.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deeplink.kvconnector.layouts.layout import Bound
from deeplink.kvconnector.relayout import digest
from deeplink.kvconnector.relayout import vectors as v
from deeplink.kvconnector.relayout.convert import address
from deeplink.kvconnector.relayout.jit import whole
from deeplink.kvconnector.relayout.jobs import COLUMNS
from deeplink.kvconnector.relayout.kernels import copy_layer, plan
from deeplink.kvconnector.relayout.plan import TILE, Chunk, Run
from deeplink.kvconnector.relayout.xxh3 import SECRET, STATE, xxh3

Elements = npt.NDArray[Any]

SLICE = 256 << 10
"""Bytes of a slice, one layer of some tokens. A core's second cache holds that twice."""


@whole
def _digests(
    table: Any,
    groups: Any,
    runs: Any,
    caches: Any,
    slices: Any,
    spans: Any,
    seeds: Any,
    row: int,
    capacity: int,
    scratch: int,
    secret: int,
    state: Any,
    out: Any,
) -> None:
    """`slices` are (first run, after the last, first span, after the last, first token), `spans` (first token, after
    the last, tile); `seeds[layer, lane]`, where a lane is one head of K or V."""
    layers, lanes = seeds.shape
    tensors = caches.size // layers
    for layer in range(layers):
        for s in range(slices.shape[0]):
            copy_layer(
                table, groups, runs, slices[s, 0], slices[s, 1], caches, layer * tensors, scratch, row, True, False
            )
            for lane in range(lanes):
                base = scratch + lane * capacity * row
                for k in range(slices[s, 2], slices[s, 3]):
                    first, last = spans[k, 0] - slices[s, 4], spans[k, 1] - slices[s, 4]
                    seed = seeds[layer, lane] | np.uint64(spans[k, 2])
                    out[layer, lane, k] = xxh3(base + first * row, (last - first) * row, seed, secret, state)


def _cut(runs: list[Run], cuts: list[int], block_size: int) -> tuple[list[Run], list[int]]:
    """The runs of each slice, `at` counted from its begin, and where in the list those of each slice end."""
    pieces: list[Run] = []
    ends = [0]
    for run in sorted(runs, key=lambda run: run.at):
        token, stop = run.at, run.at + run.count * run.tokens
        while token < stop:
            if token >= cuts[len(ends)]:
                ends.append(len(pieces))
            last = min(stop, cuts[len(ends)])
            block, first = divmod(run.first + token - run.at, block_size)
            count = 0 if first else (last - token) // block_size
            tokens = block_size if count else min(block_size - first, last - token)
            pieces.append(Run(run.block + block, max(count, 1), first, tokens, token - cuts[len(ends) - 1]))
            token += max(count, 1) * tokens
    return pieces, [*ends, len(pieces)]


def warm() -> None:
    """Compile, by digesting nothing."""
    nothing = np.zeros((0, COLUMNS), np.int64), np.zeros((0, 2), np.int64), np.zeros((0, 4), np.int64)
    seeds, out = np.zeros((1, 0), np.uint64), np.zeros((1, 0, 0), np.uint64)
    slices, spans = np.zeros((0, 5), np.int64), np.zeros((0, 3), np.int64)
    state = np.empty(STATE, np.uint64)
    _digests(*nothing, np.zeros(1, np.int64), slices, spans, seeds, 0, 0, 0, SECRET.ctypes.data, state, out)


def digests(
    caches: Sequence[Elements],
    bound: Bound,
    runs: list[Run],
    chunk: Chunk,
    seeds: npt.NDArray[np.uint64],
) -> digest.Tiles:
    """The digest of each tile, ``[layer, kv, head, tile]``. Everything must have been checked."""
    dtype, dim = caches[0].dtype, bound.head_dim
    row = dim * dtype.itemsize
    lanes = bound.kv * bound.heads
    # Whole tiles, and whole blocks where that is not much more.
    unit = math.lcm(TILE, bound.block_size) if bound.block_size <= 16 * TILE else TILE
    step = max(SLICE // (lanes * row * unit), 1) * unit
    cuts = [0, *range(step - chunk.start % step, chunk.tokens, step), chunk.tokens]
    capacity = min(step, chunk.tokens)
    pieces, ends = _cut(runs, cuts, bound.block_size)
    spans = digest.spans(chunk, cuts)
    last_spans = np.searchsorted(spans[:, 1], cuts[1:], side="right")
    slices = [
        [ends[k], ends[k + 1], last_spans[k - 1] if k else 0, last_spans[k], cuts[k]] for k in range(len(cuts) - 1)
    ]
    # room for whole lines, whatever the allocator gives
    memory = np.empty(lanes * capacity * row + v.LINE, np.uint8)
    scratch = -(-address(memory) // v.LINE) * v.LINE
    table, groups, places = plan(bound, dtype.itemsize, capacity, pieces, "wire")
    layers = len(caches) // bound.tensors
    out = np.empty((layers, lanes, len(spans)), np.uint64)
    _digests(
        table,
        groups,
        places,
        np.array([address(cache) for cache in caches], np.int64),
        np.array(slices, np.int64),
        spans,
        seeds.reshape(layers, lanes),
        row,
        capacity,
        scratch,
        SECRET.ctypes.data,
        np.empty(STATE, np.uint64),
        out,
    )
    return out.reshape(layers, bound.kv, bound.heads, len(spans))
