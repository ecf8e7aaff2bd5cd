"""The proof that the declared layout is the real one.

At start-up K and V are written through the pool's own operation, coded so that every element says where it came from,
and every byte of the touched pages is compared with what the layout says should be there. A mismatch refuses to start.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from deeplink.errors import LayoutError
from deeplink.kvconnector.cache import Cache
from deeplink.kvconnector.plan import Chunk
from deeplink.kvconnector.proof import BLOCKS, WRITTEN, codings


def prove(pool: Any, cache: Cache) -> None:
    """Prove every layer, and leave the pages zeroed. Raises LayoutError naming layer and element."""
    bound = cache.bound
    if bound.blocks < BLOCKS:
        raise LayoutError(f"a cache of {bound.blocks} pages; the layout cannot be proven with fewer than {BLOCKS}")
    table = list(WRITTEN)
    tokens = len(table) * bound.block_size
    size = BLOCKS * bound.block_size * bound.heads * bound.head_dim
    for layer in range(cache.depth):
        arrays = [array[:size] for array in cache.layers[layer * bound.tensors : (layer + 1) * bound.tensors]]
        for wire_SHTD in codings(bound.heads, tokens, bound.head_dim, cache.dtype):
            expected = tuple(np.zeros_like(array) for array in arrays)
            Cache(expected, replace(bound, blocks=BLOCKS)).scatter(wire_SHTD[None], 0, table, Chunk(0, tokens))
            for array in arrays:
                array[:] = 0
            _write(pool, layer, wire_SHTD, table, bound.block_size)
            wrong = [(side, np.flatnonzero(array != expected[side])) for side, array in enumerate(arrays)]
            for array in arrays:
                array[:] = 0
            for side, places in wrong:
                if places.size:
                    raise LayoutError(
                        f"layer {pool.start_layer + layer} does not have the layout that is declared for it: "
                        f"{places.size} elements of {'kv'[side]} differ, the first is element {int(places[0])}",
                        field="layout",
                        remedy="this SGLang build packs its cache differently; deeplink will not guess",
                    )


def _write(pool: Any, layer: int, wire_SHTD: np.ndarray[Any, Any], table: list[int], page_size: int) -> None:
    """Through the engine's own operation: tokens of `table`'s pages, in order."""
    import torch

    signed = {2: np.int16, 4: np.int32}[wire_SHTD.itemsize]
    key, value = (
        torch.from_numpy(np.ascontiguousarray(side.transpose(1, 0, 2)).view(signed)).view(pool.dtype)
        for side in wire_SHTD
    )
    slots = torch.cat([torch.arange(page_size) + page * page_size for page in table])
    pool.set_kv_buffer(None, slots, key, value, layer_id_override=pool.start_layer + layer)
