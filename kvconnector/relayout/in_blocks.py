"""Digest a chunk where it lies in the blocks, without a wire form of it.

The digests are those of `deeplink.kvconnector.relayout.digest.tiles`. Compiled
(`deeplink.kvconnector.relayout.slices`), a slice at a time is gathered and digested while it is in the cache. That pays
only where nobody wants the wire: for a wire too, a `gather` that streams it past the caches and then `tiles` is faster
than writing it twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deeplink.errors import LayoutError
from deeplink.kvconnector.layouts.layout import Bound
from deeplink.kvconnector.relayout import compiled, convert, digest
from deeplink.kvconnector.relayout.moves import checked
from deeplink.kvconnector.relayout.plan import Chunk, Run

Elements = npt.NDArray[Any]


def tiles(
    caches: Sequence[Elements],
    bound: Bound,
    where: Iterable[Run],
    chunk: Chunk,
    first_layer: int = 0,
    first_head: int = 0,
    by: compiled.By | None = None,
) -> digest.Tiles:
    """The digest of each tile of the chunk, ``[layer, kv, head, tile]``.

    `where` must be all of the chunk. `by` insists on numpy or numba. A wrong plan raises LayoutError.
    """
    if not caches:
        raise LayoutError("a digest of no layers")
    layers = convert.check_caches(caches, bound, caches[0].dtype)
    runs = checked(where, bound, chunk.tokens)
    _check_whole(runs, chunk)
    if compiled.wanted(by):
        from deeplink.kvconnector.relayout import slices  # takes a moment, and needs numba

        seeds = digest.seeds(layers, bound.kv, bound.heads, first_layer, first_head)
        return slices.digests(caches, bound, runs, chunk, seeds)
    one = np.empty(convert.wire_shape(bound, 1, chunk.tokens), caches[0].dtype)
    parts = []
    for layer in range(layers):
        convert.gather(caches[layer * bound.tensors : (layer + 1) * bound.tensors], bound, runs, one, by="numpy")
        parts.append(digest.tiles(chunk, one, first_layer + layer, first_head, by="numpy"))
    return np.concatenate(parts)


def warm(by: compiled.By | None = None) -> None:
    """Compile what `tiles` needs beyond `compiled.warm`: as long again, and kept as well."""
    if compiled.wanted(by):
        from deeplink.kvconnector.relayout import slices

        slices.warm()


def _check_whole(runs: list[Run], chunk: Chunk) -> None:
    token = 0
    for run in sorted(runs, key=lambda run: run.at):
        if run.at != token:
            break
        token += run.count * run.tokens
    if token != chunk.tokens:
        raise LayoutError(f"the runs of a chunk of {chunk.tokens} tokens are not all of it: token {token}")
