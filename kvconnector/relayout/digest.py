"""A digest of a chunk that does not depend on how either side packs its cache.

It is taken over the wire values, after any cast: one 64-bit xxh3 per (layer, kv, head, tile of 16 tokens), seeded
with that logical position. Block size, layout and rank do not enter, so both sides compute the same number, and a
suffix or one resumed chunk can be verified alone. The digest of more than one tile is the sum modulo 2^64, so chunks
and ranks add up in any order. It finds corruption and mistakes; it is no defence against someone who wants to cheat.

It can be taken of a sample of the tiles, in a pattern that no run of wrong ones slips through. What lies in blocks is
digested there by `deeplink.kvconnector.relayout.in_blocks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from deeplink.kvconnector.relayout import compiled
from deeplink.kvconnector.relayout.plan import TILE, Chunk

Tiles = npt.NDArray[np.uint64]
_MASK = (1 << 64) - 1


class Sample(msgspec.Struct, frozen=True):
    """Which tiles are digested: those where the sum of layer, side (K 0, V 1), head, tile and `offset` is a multiple of
    `every`. So one of every so many tiles in a row of a head is, and one of as many heads or layers in a row.

    The numbers are those of the model and the prompt, so it is the same for a part, a suffix and a resumed chunk.
    """

    every: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 1
    offset: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)] = 0


ALL = Sample()
SAMPLED = 8
"""`every` of the policy "sampled": 128 tokens of a head, which is a block or less, are not wrong unseen."""


def tiles(
    chunk: Chunk,
    wire_LSHTD: npt.NDArray[Any],
    first_layer: int = 0,
    first_head: int = 0,
    by: compiled.By | None = None,
    sample: Sample = ALL,
) -> Tiles:
    """One digest per tile, shape ``[layer, kv, head, tile]``, for a dense chunk in wire form; 0 for a tile that is not
    in the sample. `by` insists on numpy (and the xxhash package) or numba; the values are the same."""
    layers, sides, heads, tokens, dim = wire_LSHTD.shape
    row = dim * wire_LSHTD.itemsize
    where = spans(chunk, [0, tokens])
    where[:, :2] *= row
    seed = seeds(layers, sides, heads, first_layer, first_head).reshape(-1)
    phase = _phases(layers, sides, heads, first_layer + first_head + sample.offset)
    every = sample.every
    dense = np.ascontiguousarray(wire_LSHTD)
    if compiled.wanted(by):
        from deeplink.kvconnector.relayout import xxh3

        out = xxh3.of_lanes(dense, where, seed, phase, every)
    else:
        flat = dense.view(np.uint8).reshape(-1).data
        out = np.empty((len(seed), len(where)), np.uint64)
        of = [(a, b, tile) for a, b, tile in where.tolist()]
        for lane, first in enumerate(seed.tolist()):
            base = lane * tokens * row
            out[lane] = [
                0 if (phase[lane] + tile) % every else xxh3_64_intdigest(flat[base + a : base + b], first | tile)
                for a, b, tile in of
            ]
    shaped: Tiles = out.reshape(layers, sides, heads, len(where))
    return shaped


def spans(chunk: Chunk, cuts: Sequence[int]) -> npt.NDArray[np.int64]:
    """Where the tiles are, as (first token of the chunk, after the last, tile of the prompt). `cuts` are the first and
    the last token, and others between them that are on a tile's edge anyhow."""
    first, last = cuts[0], cuts[-1]
    edges = np.array([first, *range(first + TILE - (chunk.start + first) % TILE, last, TILE), last])
    found = np.empty((len(edges) - 1, 3), np.int64)
    found[:, 0], found[:, 1], found[:, 2] = edges[:-1], edges[1:], (chunk.start + edges[:-1]) // TILE
    return found


def seeds(layers: int, sides: int, heads: int, first_layer: int = 0, first_head: int = 0) -> Tiles:
    """The seed of each lane's tile 0, ``[layer, kv, head]``; a tile's own number goes into the low 32 bits."""
    # Every number is far below its field's width, so two positions never share a seed.
    layer = np.arange(first_layer, first_layer + layers, dtype=np.uint64)[:, None, None] << np.uint64(48)
    side = np.arange(sides, dtype=np.uint64)[:, None] << np.uint64(47)
    head = np.arange(first_head, first_head + heads, dtype=np.uint64) << np.uint64(32)
    seed: Tiles = layer | side | head
    return seed


def _phases(layers: int, sides: int, heads: int, first: int) -> npt.NDArray[np.int64]:
    """What each lane adds to the number of a tile, to say whether it is in a sample."""
    steps = np.add.outer(np.add.outer(np.arange(layers), np.arange(sides)), np.arange(heads))
    return steps.reshape(-1).astype(np.int64) + first


def total(digests: Tiles) -> int:
    """One number for many tiles: their sum modulo 2^64."""
    return int(digests.sum(dtype=np.uint64)) & _MASK
