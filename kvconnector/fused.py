"""Gather a chunk and digest it in one pass, or digest it where it lies.

The digests are those of `deeplink.kvconnector.digest.tiles`, the wire is that of `deeplink.kvconnector.convert.gather`.
Compiled (`deeplink.kvconnector.slices`), a slice at a time is both gathered and digested while it is in the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deeplink.errors import LayoutError
from deeplink.kvconnector import compiled, convert, digest
from deeplink.kvconnector.layout import Bound
from deeplink.kvconnector.moves import checked
from deeplink.kvconnector.plan import Chunk, Run

Elements = npt.NDArray[Any]


def gather(
    caches: Sequence[Elements],
    bound: Bound,
    where: Iterable[Run],
    chunk: Chunk,
    wire_LSHTD: Elements | None = None,
    first_layer: int = 0,
    first_head: int = 0,
    by: compiled.By | None = None,
) -> digest.Tiles:
    """The digest of each tile of the chunk, ``[layer, kv, head, tile]``; with `wire_LSHTD`, blocks to wire as well.

    `where` must be all of the chunk. `by` insists on numpy or numba. A wrong plan raises LayoutError, before anything
    moves.
    """
    if not caches:
        raise LayoutError("a digest of no layers")
    layers = convert.check_caches(caches, bound, caches[0].dtype)
    runs = checked(where, bound, chunk.tokens)
    _check_whole(runs, chunk)
    if wire_LSHTD is not None:
        convert.check(caches, bound, wire_LSHTD)
        if wire_LSHTD.shape[3] != chunk.tokens:
            raise LayoutError(f"a wire chunk of {wire_LSHTD.shape[3]} tokens for {chunk.tokens}")
        if not wire_LSHTD.flags.writeable:
            raise ValueError("the target of a copy is read-only")
    if compiled.wanted(by):
        from deeplink.kvconnector import slices  # takes a moment, and needs numba

        seeds = digest.seeds(layers, bound.kv, bound.heads, first_layer, first_head)
        return slices.gather(caches, bound, runs, chunk, seeds, wire_LSHTD)
    if wire_LSHTD is not None:
        convert.gather(caches, bound, runs, wire_LSHTD, by="numpy")
        return digest.tiles(chunk, wire_LSHTD, first_layer, first_head, by="numpy")
    one = np.empty(convert.wire_shape(bound, 1, chunk.tokens), caches[0].dtype)
    parts = []
    for layer in range(layers):
        convert.gather(caches[layer * bound.tensors : (layer + 1) * bound.tensors], bound, runs, one, by="numpy")
        parts.append(digest.tiles(chunk, one, first_layer + layer, first_head, by="numpy"))
    return np.concatenate(parts)


def _check_whole(runs: list[Run], chunk: Chunk) -> None:
    token = 0
    for run in sorted(runs, key=lambda run: run.at):
        if run.at != token:
            break
        token += run.count * run.tokens
    if token != chunk.tokens:
        raise LayoutError(f"the runs of a chunk of {chunk.tokens} tokens are not all of it: token {token}")
