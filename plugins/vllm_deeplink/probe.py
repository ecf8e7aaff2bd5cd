"""The proof that the declared layout is the real one, by the engine's own cache-write operation.

vLLM's CPU cache has the same shape and strides with AMX and without, and other bytes: see
`deeplink.kvconnector.caches.proof`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from deeplink.kvconnector.caches import proof
from deeplink.kvconnector.caches.cache import Cache
from deeplink.kvconnector.layouts.elements import FORMATS, Format
from deeplink.kvconnector.relayout import device
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
    import torch

    names = list(tensors)
    small = cache.dtype.itemsize == 1

    def write(layer: int, key_THD: npt.NDArray[Any], value_THD: npt.NDArray[Any], slots: npt.NDArray[np.int64]) -> None:
        tensor, module = tensors[names[layer]], attention_layer(vllm_config, names[layer])
        if small:
            given = vllm_config.model_config.dtype
            pair = _values(module, (key_THD, value_THD), FORMATS[dtype], given)
        else:
            pair = [device.of_elements(states, tensor.dtype) for states in (key_THD, value_THD)]
        key, value, places = (each.to(tensor.device) for each in (*pair, torch.from_numpy(slots)))
        module.impl.do_kv_cache_update(module, key, value, tensor, places)

    proof.prove(cache, write, [f"layer {name}" for name in names], _codings(cache, FORMATS[dtype]) if small else None)


def _codings(cache: Cache, form: Format) -> list[npt.NDArray[np.uint8]]:
    """Of elements that are normal numbers."""
    normal = range(1 << (form.precision - 1), form.top + 1)
    codes = np.array([code | sign for sign in (0, form.sign) for code in normal], np.uint8)
    bound = cache.bound
    return proof.byte_codings(bound.heads, len(proof.WRITTEN) * bound.block_size, bound.head_dim, codes)


def _values(layer: Any, pair_THD: Sequence[npt.NDArray[Any]], form: Format, given: torch.dtype) -> list[torch.Tensor]:
    """K and V of type `given` that become these elements."""
    import torch

    table = np.array([form.value(code) for code in range(256)], np.float32)
    scales = layer._k_scale_float, layer._v_scale_float
    return [(torch.from_numpy(table[side]) * scale).to(given) for side, scale in zip(pair_THD, scales, strict=True)]
