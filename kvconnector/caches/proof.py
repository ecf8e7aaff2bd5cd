"""The proof that a declared layout is the real one: two packings can have the same shape and strides and still be
different bytes, so nothing is believed.

An engine's plugin writes K and V through the engine's own operation at start-up, coded so that every element says where
it came from, and every byte of the touched blocks is compared with what the layout says should be there. A mismatch
refuses to start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from deeplink.errors import LayoutError
from deeplink.kvconnector.caches.cache import Cache
from deeplink.kvconnector.relayout import device
from deeplink.kvconnector.relayout.plan import Chunk

BLOCKS = 4
"""How many of the first blocks are looked at; 3 and 1 are written, so the block stride and its order count too."""
WRITTEN = (3, 1)

_FIRST, _COUNT = 0x0400, 0x7B00 - 0x0400
"""Bit patterns that are finite, normal numbers in bf16 and fp16 alike (and in fp32 as its upper half)."""

Write = Callable[[int, npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[np.int64]], None]
"""Writes into one layer of the cache, counted from 0, through the engine's own operation: K and V ``[token, head,
dim]`` as elements of the cache's storage type, and each token's slot, which is ``block * block size + place``."""


def prove(cache: Cache, write: Write, names: Sequence[str], coded: Sequence[npt.NDArray[Any]] | None = None) -> None:
    """Prove every layer of a cache that nobody uses yet, and leave the blocks zeroed.

    `names` are the layers' for people. `coded` are what is written instead of `codings`, where the engine's operation
    does not take any element there is: each ``[2, head, token, dim]`` of the tokens of `WRITTEN`. Raises LayoutError
    naming layer and element.
    """
    bound = cache.bound
    if bound.blocks < BLOCKS:
        raise LayoutError(f"a cache of {bound.blocks} blocks; its layout cannot be proven with fewer than {BLOCKS}")
    few = replace(bound, blocks=BLOCKS)
    slots = np.concatenate([np.arange(bound.block_size) + block * bound.block_size for block in WRITTEN])
    padded = BLOCKS * bound.block_elements // bound.tensors
    if coded is None:
        coded = codings(bound.heads, slots.size, bound.head_dim, cache.dtype)
    for layer, name in zip(range(cache.depth), names, strict=True):
        arrays = cache.layers[layer * bound.tensors : (layer + 1) * bound.tensors]
        live = [array[: max(few.elements(place), padded)] for place, array in enumerate(arrays)]
        for wire_SHTD in coded:
            expected = tuple(np.zeros(len(array), cache.dtype) for array in live)
            Cache(expected, few).scatter(wire_SHTD[None], 0, WRITTEN, Chunk(0, slots.size))
            _clear(live)
            key_THD, value_THD = (np.ascontiguousarray(side.transpose(1, 0, 2)) for side in wire_SHTD)
            write(layer, key_THD, value_THD, slots)
            wrong = [np.flatnonzero(_read(array) != right) for array, right in zip(live, expected, strict=True)]
            _clear(live)
            for tensor, found in enumerate(wrong):
                if found.size:
                    raise LayoutError(
                        f"{name} does not have the layout that is declared for it: of {len(live[tensor])} elements "
                        f"of its tensor {tensor} {found.size} differ, the first is element {int(found[0])}",
                        field="layout",
                        remedy="this build of the engine packs its cache differently; deeplink will not guess",
                    )


def _read(array: Any) -> npt.NDArray[Any]:
    """What is in memory now: the host's itself, a copy of a device's."""
    return array if isinstance(array, np.ndarray) else device.array(array.cpu())


def _clear(arrays: Sequence[Any]) -> None:
    for array in arrays:
        array[:] = 0


def byte_codings(heads: int, tokens: int, dim: int, codes: npt.NDArray[np.uint8]) -> list[npt.NDArray[np.uint8]]:
    """As `codings`, for elements of one byte: as many as it takes to number everything with `codes`, which are all
    different, and none of them that of an element that was never written."""
    shape = (2, heads, tokens, dim)
    by_token = np.broadcast_to(np.arange(tokens)[:, None], shape)
    by_rest = np.broadcast_to(np.arange(2 * heads * dim).reshape(2, heads, 1, dim), shape)
    found = []
    for numbers, count in ((by_token, tokens), (by_rest, 2 * heads * dim)):
        place = 1
        while place < count:
            found.append(codes[numbers // place % len(codes)])
            place *= len(codes)
    return found


def codings(heads: int, tokens: int, dim: int, dtype: np.dtype[Any]) -> list[npt.NDArray[Any]]:
    """Two codings ``[2, head, token, dim]``: one numbers the tokens, one everything else. Together they are unique.

    `dtype` is an unsigned integer as large as the cache's elements.
    """
    shape = (2, heads, tokens, dim)
    by_token = np.broadcast_to(np.arange(tokens)[:, None], shape)
    by_rest = np.broadcast_to(np.arange(2 * heads * dim).reshape(2, heads, 1, dim), shape)
    shift = 8 * (dtype.itemsize - 2)
    return [((_FIRST + codes % _COUNT).astype(dtype) << dtype.type(shift)) for codes in (by_token, by_rest)]
