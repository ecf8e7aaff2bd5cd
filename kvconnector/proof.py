"""Values that say where they came from. An engine's plugin writes them through the engine's own operation at start-up,
and compares every byte of the touched blocks with what the declared layout says: two packings can have the same shape
and strides and still be different bytes, so nothing is believed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

BLOCKS = 4
"""How many of the first blocks are looked at; 3 and 1 are written, so the block stride and its order count too."""
WRITTEN = (3, 1)

_FIRST, _COUNT = 0x0400, 0x7B00 - 0x0400
"""Bit patterns that are finite, normal numbers in bf16 and fp16 alike (and in fp32 as its upper half)."""


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
