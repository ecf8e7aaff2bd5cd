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
from deeplink.kvconnector.elements import FORMATS, Format
from deeplink.kvconnector.plan import Chunk
from deeplink.kvconnector.proof import BLOCKS, WRITTEN, byte_codings, codings
from vllm_deeplink.adapter import attention_layer

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig


def prove(vllm_config: VllmConfig, cache: Cache, tensors: dict[str, torch.Tensor], dtype: str) -> None:
    """Prove every layer of a cache of elements `dtype`, and leave the blocks zeroed. Raises LayoutError naming layer
    and element.

    What the engine writes to a cache of 8 bits are values, which it divides by the layer's scale and rounds: its
    elements and scales are proven with the layout.
    """
    bound = cache.bound
    if bound.blocks < BLOCKS:
        raise LayoutError(f"a cache of {bound.blocks} blocks; the layout cannot be proven with fewer than {BLOCKS}")
    table = list(WRITTEN)
    tokens = len(table) * bound.block_size
    for index, (name, tensor) in enumerate(tensors.items()):
        live = cache.layers[index][: BLOCKS * bound.block_elements]
        for wire_SHTD in _codings(bound.heads, tokens, bound.head_dim, cache.dtype, dtype):
            expected = np.zeros(BLOCKS * bound.block_elements, cache.dtype)
            Cache((expected,), replace(bound, blocks=BLOCKS)).scatter(wire_SHTD[None], 0, table, Chunk(0, tokens))
            live[:] = 0
            layer = attention_layer(vllm_config, name)
            if cache.dtype.itemsize == 1:
                pair = _values(layer, wire_SHTD, FORMATS[dtype], vllm_config.model_config.dtype)
            else:
                pair = _elements(wire_SHTD, tensor)
            _write(layer, tensor, pair, table, bound.block_size)
            wrong = np.flatnonzero(_read(live, cache.dtype) != expected)
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


def _read(live: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """What is in memory now: a view of the host's, a copy of a device's."""
    if isinstance(live, np.ndarray):
        return live
    import torch

    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    copy: np.ndarray[Any, Any] = live.cpu().view(signed).numpy().view(dtype)
    return copy


def _codings(heads: int, tokens: int, dim: int, storage: np.dtype[Any], dtype: str) -> list[np.ndarray[Any, Any]]:
    if storage.itemsize > 1:
        return codings(heads, tokens, dim, storage)
    form = FORMATS[dtype]
    normal = range(1 << (form.precision - 1), form.top + 1)
    return list(
        byte_codings(
            heads, tokens, dim, np.array([code | sign for sign in (0, form.sign) for code in normal], np.uint8)
        )
    )


def _elements(wire_SHTD: np.ndarray[Any, Any], tensor: torch.Tensor) -> list[torch.Tensor]:
    """K and V that are stored as they are."""
    import torch

    signed = {2: np.int16, 4: np.int32}[wire_SHTD.itemsize]
    return [torch.from_numpy(_by_token(side).view(signed)).view(tensor.dtype) for side in wire_SHTD]


def _values(layer: Any, wire_SHTD: np.ndarray[Any, Any], form: Format, given: torch.dtype) -> list[torch.Tensor]:
    """K and V of type `given` that become these elements."""
    import torch

    table = np.array([form.value(code) for code in range(256)], np.float32)
    scales = layer._k_scale_float, layer._v_scale_float
    return [
        (torch.from_numpy(table[_by_token(side)]) * scale).to(given)
        for side, scale in zip(wire_SHTD, scales, strict=True)
    ]


def _by_token(side_HTD: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(side_HTD.transpose(1, 0, 2))


def _write(layer: Any, tensor: torch.Tensor, pair: list[torch.Tensor], table: list[int], block_size: int) -> None:
    """Through the engine's own operation: tokens of `table`'s blocks, in order."""
    import torch

    slots = torch.cat([torch.arange(block_size) + block * block_size for block in table]).to(tensor.device)
    layer.impl.do_kv_cache_update(layer, *(side.to(tensor.device) for side in pair), tensor, slots)
