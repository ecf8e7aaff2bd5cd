"""A digest of a chunk that does not depend on how either side packs its cache.

It is taken over the wire values, after any cast: one 64-bit xxh3 per (layer, kv, head, tile of 16 tokens), seeded
with that logical position. Block size, layout and rank do not enter, so both sides compute the same number, and a
suffix or one resumed chunk can be verified alone. The digest of more than one tile is the sum modulo 2^64, so chunks
and ranks add up in any order. It finds corruption and mistakes; it is no defence against someone who wants to cheat.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from deeplink.kvconnector.plan import TILE, Chunk

Tiles = npt.NDArray[np.uint64]
_MASK = (1 << 64) - 1


def tiles(chunk: Chunk, wire_LSHTD: npt.NDArray[Any], first_layer: int = 0, first_head: int = 0) -> Tiles:
    """One digest per tile, shape ``[layer, kv, head, tile]``, for a dense chunk in wire form."""
    layers, sides, heads, tokens, dim = wire_LSHTD.shape
    row = dim * wire_LSHTD.itemsize
    cuts = [0, *range(TILE - chunk.start % TILE, tokens, TILE), tokens]
    spans = [(a * row, b * row, (chunk.start + a) // TILE) for a, b in itertools.pairwise(cuts)]
    flat = np.ascontiguousarray(wire_LSHTD).view(np.uint8).reshape(-1).data
    out = np.empty((layers * sides * heads, len(spans)), np.uint64)
    base = 0
    for lane in range(layers * sides * heads):
        layer, rest = divmod(lane, sides * heads)
        side, head = divmod(rest, heads)
        # Every number is far below its field's width, so two positions never share a seed.
        seed = ((first_layer + layer) << 48) | (side << 47) | ((first_head + head) << 32)
        out[lane] = [xxh3_64_intdigest(flat[base + a : base + b], seed | tile) for a, b, tile in spans]
        base += tokens * row
    return out.reshape(layers, sides, heads, len(spans))


def total(digests: Tiles) -> int:
    """One number for many tiles: their sum modulo 2^64."""
    return int(digests.sum(dtype=np.uint64)) & _MASK
