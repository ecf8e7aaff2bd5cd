"""The proof that the declared layout is the real one, by the pool's own operation: see
`deeplink.kvconnector.caches.proof`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from deeplink.kvconnector.caches import proof
from deeplink.kvconnector.caches.cache import Cache
from deeplink.kvconnector.relayout import device


def prove(pool: Any, cache: Cache) -> None:
    """Prove every layer, and leave the pages zeroed. Raises LayoutError naming layer and element."""
    import torch

    def write(layer: int, key_THD: npt.NDArray[Any], value_THD: npt.NDArray[Any], slots: npt.NDArray[np.int64]) -> None:
        key, value = (device.of_elements(states, pool.dtype) for states in (key_THD, value_THD))
        pool.set_kv_buffer(None, torch.from_numpy(slots), key, value, layer_id_override=pool.start_layer + layer)

    proof.prove(cache, write, [f"layer {pool.start_layer + layer}" for layer in range(cache.depth)])
