"""One check of re-layout for every way of doing it: against the reference, and nothing else is touched.

Needs no test framework, because an engine's Python runs it too, where there are torch and numba but no pytest:

    python relayout_check.py torch
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from fake_device import installed
from reference import AXES, address, sides, tensor_sizes

from deeplink.kvconnector.layouts.catalogue import ENTRIES, Entry
from deeplink.kvconnector.layouts.layout import ELEMENTS, RECORDS, Bound, Layout
from deeplink.kvconnector.relayout import convert, device
from deeplink.kvconnector.relayout.plan import Chunk, Run, runs

LAYERS, BLOCKS, BLOCK_SIZE, GUARD = 2, 4, 48, 128
TABLE, CHUNK, WANTED = [2, 3, 0], Chunk(3, 139), Chunk(9, 120)
"""Blocks 2 and 3 are adjacent, the first and the last are partial, and in 48 tokens are lines, half lines and less."""

Gather = Callable[[Sequence[Any], Bound, list[Run], Any], None]
Scatter = Callable[[Any, Bound, list[Run], Sequence[Any]], None]


def sizes(entry: Entry, dtype: str) -> dict[str, int]:
    vector = "head" not in entry.layout
    dim = RECORDS.get(dtype, 576 if vector else 64)
    return {"block": BLOCKS, "head": 1 if vector else 2, "token": BLOCK_SIZE, "dim": dim}


@lru_cache
def addresses(text: str, block: int, head: int, token: int, dim: int) -> np.ndarray:
    """Every address of a cache by the reference, as ``[kv, block, head, token, dim]``."""
    shape = (block, head, token)
    at = dict(zip(AXES, np.indices(shape), strict=False))
    extents = dict(zip(AXES, (*shape, dim), strict=True))
    out = np.empty((len(sides(text)), *shape, dim), np.int64)
    for place, side in enumerate(sides(text)):
        for d in range(dim):
            out[place, ..., d] = address(text, side, {**at, "dim": d}, extents)
    return out


def guarded(size: int, itemsize: int, shift: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Random elements, `shift` bytes after the begin of a line, and all of the memory that they are in."""
    memory = np.full(size * itemsize + 3 * GUARD, 0xA5, np.uint8)
    begin = GUARD + -memory.__array_interface__["data"][0] % 64 + shift
    inside = memory[begin : begin + size * itemsize]
    inside[:] = np.random.default_rng(seed).integers(0, 256, inside.size, np.uint8)
    return inside.view(f"u{itemsize}"), memory


def intact(inside: np.ndarray, memory: np.ndarray) -> bool:
    """Nothing around it was written."""
    begin = inside.__array_interface__["data"][0] - memory.__array_interface__["data"][0]
    return bool((memory[:begin] == 0xA5).all() and (memory[begin + inside.nbytes :] == 0xA5).all())


def check(entry: Entry, dtype: str, gather: Gather, scatter: Scatter, shift: int = 0, wide: int = 0) -> None:
    """Gather and scatter between a cache of this layout and the wire, in memory that begins `shift` bytes after a line.
    With `wide`, blocks are that many elements further apart than need be."""
    size, itemsize = sizes(entry, dtype), ELEMENTS[dtype]
    where = addresses(entry.layout, *size.values())
    tensors = tensor_sizes(entry.layout, size)
    strides = None
    if wide:
        block = sum(tensors) // BLOCKS
        where = where + np.arange(BLOCKS)[:, None, None, None] * wide
        tensors, strides = [sum(tensors) + BLOCKS * wide], {"block": block + wide}
    bound = Layout.parse(entry.layout).bind(
        heads=size["head"], head_dim=size["dim"], block_size=BLOCK_SIZE, blocks=BLOCKS, strides=strides
    )
    made = [guarded(n, itemsize, shift, seed) for seed, n in enumerate(tensors * LAYERS)]
    caches = [cache for cache, _ in made]
    shape = convert.wire_shape(bound, LAYERS, CHUNK.tokens)
    flat, wire_memory = guarded(math.prod(shape), itemsize, shift, 99)
    wire = flat.reshape(shape)

    def logical(chunk: Chunk) -> np.ndarray:
        tokens = np.arange(chunk.start, chunk.stop)
        return where[:, np.array(TABLE)[tokens // BLOCK_SIZE], :, tokens % BLOCK_SIZE].transpose(1, 2, 0, 3)

    def layers() -> list[np.ndarray]:
        n = len(tensors)
        return [np.concatenate(caches[at : at + n]) for at in range(0, len(caches), n)]

    before = layers()
    gather(caches, bound, list(runs(TABLE, BLOCK_SIZE, CHUNK)), wire)
    for layer, got in zip(before, wire, strict=True):
        np.testing.assert_array_equal(got, layer[logical(CHUNK)])
    for layer, old in zip(layers(), before, strict=True):
        np.testing.assert_array_equal(layer, old)

    # All of the wire but two tokens at either end, into a part of the cache.
    changed = ~wire
    wire[:] = changed
    scatter(wire, bound, list(runs(TABLE, BLOCK_SIZE, WANTED, CHUNK.start)), caches)
    skip = WANTED.start - CHUNK.start
    for layer, old, new in zip(layers(), before, changed, strict=True):
        should = old.copy()
        should[logical(WANTED)] = new[:, :, skip : skip + WANTED.tokens]
        np.testing.assert_array_equal(layer, should)
    np.testing.assert_array_equal(wire, changed)

    # A part of the wire only.
    gather(caches, bound, list(runs(TABLE, BLOCK_SIZE, CHUNK))[1:], wire)
    first = BLOCK_SIZE - CHUNK.start
    np.testing.assert_array_equal(wire[:, :, :, :first], changed[:, :, :, :first])
    assert all(intact(*each) for each in [(flat, wire_memory), *made])


def cases() -> list[tuple[Entry, str]]:
    """One dtype of each size for every layout."""
    return [
        (entry, dtype) for entry in ENTRIES for dtype in {ELEMENTS[dtype]: dtype for dtype in entry.dtypes}.values()
    ]


def _tensors(caches: Sequence[np.ndarray], dtype: str) -> list[Any]:
    import torch

    kinds = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}
    return [torch.frombuffer(cache.view(np.uint8), dtype=torch.uint8).view(kinds[ELEMENTS[dtype]]) for cache in caches]


def check_torch(entry: Entry, dtype: str) -> None:
    check(
        entry,
        dtype,
        lambda caches, bound, where, wire: device.gather(_tensors(caches, dtype), bound, where, wire),
        lambda wire, bound, where, caches: device.scatter(wire, bound, where, _tensors(caches, dtype)),
    )


def check_numba(entry: Entry, dtype: str) -> None:
    check(
        entry,
        dtype,
        lambda *arguments: convert.gather(*arguments, by="numba"),
        lambda *arguments: convert.scatter(*arguments, by="numba"),
    )


def main(ways: list[str]) -> None:
    for way in ways:
        for entry, dtype in cases():
            {"torch": check_torch, "numba": check_numba}[way](entry, dtype)
    # The way of other devices, with layers in wire form of their own.
    with installed():
        for entry, dtype in cases() if "torch" in ways else []:
            check_torch(entry, dtype)
    print(f"{len(cases())} layouts, {' and '.join(ways)}")


if __name__ == "__main__":
    main(sys.argv[1:])
