"""The proof that the declared layout is the real one.

Two packings can have the same shape and strides and still be different bytes (vLLM's CPU cache with and without AMX),
so nothing is believed. At start-up K and V are written through the engine's own cache-write operation, coded so that
every element says where it came from, and every byte of the touched blocks is compared with what the layout says
should be there. A mismatch refuses to start.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from deeplink.errors import LayoutError
from deeplink.kvconnector.cache import Cache
from deeplink.kvconnector.plan import Chunk
from deeplink.kvconnector.proof import BLOCKS, WRITTEN, codings
from vllm_deeplink.adapter import attention_layer

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig


def prove(vllm_config: VllmConfig, cache: Cache, tensors: dict[str, torch.Tensor]) -> None:
    """Prove every layer, and leave the blocks zeroed. Raises LayoutError naming layer and element."""
    bound = cache.bound
    if bound.blocks < BLOCKS:
        raise LayoutError(f"a cache of {bound.blocks} blocks; the layout cannot be proven with fewer than {BLOCKS}")
    table = list(WRITTEN)
    tokens = len(table) * bound.block_size
    for index, (name, tensor) in enumerate(tensors.items()):
        array = cache.layers[index]
        for wire_SHTD in codings(bound.heads, tokens, bound.head_dim, array.dtype):
            expected = np.zeros(BLOCKS * bound.block_elements, array.dtype)
            Cache((expected,), replace(bound, blocks=BLOCKS)).scatter(wire_SHTD[None], 0, table, Chunk(0, tokens))
            live = array[: BLOCKS * bound.block_elements]
            live[:] = 0
            _write(attention_layer(vllm_config, name), tensor, wire_SHTD, table, bound.block_size)
            wrong = np.flatnonzero(live != expected)
            live[:] = 0
            if wrong.size:
                at = int(wrong[0])
                raise LayoutError(
                    f"layer {name} does not have the layout its attention backend declares: "
                    f"{wrong.size} of {expected.size} elements differ, the first is element "
                    f"{at % bound.block_elements} of block {at // bound.block_elements}",
                    field="layout",
                    remedy="this vLLM build packs its cache differently; deeplink will not guess",
                )


def _write(
    layer: Any, tensor: torch.Tensor, wire_SHTD: np.ndarray[Any, Any], table: list[int], block_size: int
) -> None:
    """Through the engine's own operation: tokens of `table`'s blocks, in order."""
    import torch

    signed = {2: np.int16, 4: np.int32}[wire_SHTD.itemsize]
    key, value = (
        torch.from_numpy(np.ascontiguousarray(side.transpose(1, 0, 2)).view(signed)).view(tensor.dtype)
        for side in wire_SHTD
    )
    slots = torch.cat([torch.arange(block_size) + block * block_size for block in table])
    layer.impl.do_kv_cache_update(layer, key, value, tensor, slots)
