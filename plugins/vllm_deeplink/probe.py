"""The proof that the declared layout is the real one, by the engine's own cache-write operation.

vLLM's CPU cache has the same shape and strides with AMX and without, and other bytes: see `deeplink.kvconnector.proof`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from deeplink.kvconnector import device, proof
from deeplink.kvconnector.cache import Cache
from vllm_deeplink.adapter import attention_layer

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig


def prove(vllm_config: VllmConfig, cache: Cache, tensors: dict[str, torch.Tensor]) -> None:
    """Prove every layer, and leave the blocks zeroed. Raises LayoutError naming layer and element."""
    import torch

    names = list(tensors)

    def write(layer: int, key_THD: npt.NDArray[Any], value_THD: npt.NDArray[Any], slots: npt.NDArray[np.int64]) -> None:
        tensor, module = tensors[names[layer]], attention_layer(vllm_config, names[layer])
        key, value = (device.of_elements(states, tensor.dtype) for states in (key_THD, value_THD))
        module.impl.do_kv_cache_update(module, key, value, tensor, torch.from_numpy(slots))

    proof.prove(cache, write, [f"layer {name}" for name in names])
