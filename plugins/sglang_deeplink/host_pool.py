"""The pool in host memory from which SGLang's hierarchical cache writes pages to a store, and into which it reads them,
in kvconnector's terms. Tested with SGLang 0.5.23."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from deeplink.errors import LayoutError
from deeplink.kvconnector.caches import proof
from deeplink.kvconnector.caches.cache import Cache
from deeplink.kvconnector.caches.device_cache import of_tensors
from deeplink.kvconnector.caches.group import Group
from deeplink.kvconnector.contracts.contract import CacheGroup
from deeplink.kvconnector.contracts.negotiate import FULL
from deeplink.kvconnector.layouts.layout import Layout
from deeplink.kvconnector.relayout import device
from sglang_deeplink.adapter import DTYPES

POOL = "MHATokenToKVPoolHost"

LAYOUTS = {
    "layer_first": "kv | block token head dim",
    "page_first": "kv | block token head dim",
    "page_first_direct": "kv | block token head dim",
    "page_head": "kv | block head token dim",
}
"""What ``--hicache-mem-layout`` names, and the order of axes in each layer's K and in its V. How far apart their
elements are is read from the live tensors."""

DEVICE_LAYOUTS = ("nhd",)


def read(pool: Any) -> Group:
    """The pool of a model with one rank. Raises LayoutError, naming the field, for any that is not known here."""
    kind = type(pool).__name__
    if kind != POOL:
        raise LayoutError(
            "the host pool is not of a kind whose pages this release stores",
            field="kind of host pool",
            ours=kind,
            theirs=POOL,
        )
    dtype = str(pool.dtype).removeprefix("torch.")
    for field, found, known in (
        ("hicache-mem-layout", pool.layout, tuple(LAYOUTS)),
        ("dtype", dtype, DTYPES),
        # Pages are copied to the host as they are, so what is no row of [head, dim] there is none here.
        *(("layout of the device's pool", info.buffers.layout.value, DEVICE_LAYOUTS) for info in pool._buffer_infos),
    ):
        if found not in known:
            raise LayoutError(
                "the host pool is not of a kind whose pages this release stores",
                field=field,
                ours=str(found),
                theirs=", ".join(known),
            )
    for field, found, only in (
        ("v_head_dim", pool.v_head_dim, pool.head_dim),
        ("layers of a draft model", pool.layer_num - pool.target_layer_num, 0),
        ("dcp_size", pool.dcp_size, 1),
    ):
        if found != only:
            raise LayoutError("the host pool is not one whose pages this release stores", field=field, ours=str(found))
    layers = tuple(range(pool.start_layer, pool.start_layer + pool.layer_num))
    views = [_layer(pool, side, place) for place in range(pool.layer_num) for side in (pool.k_buffer, pool.v_buffer)]
    text = LAYOUTS[pool.layout]
    axes = text.removeprefix("kv | ").split()
    bound = Layout.parse(text).bind(
        heads=pool.head_num,
        head_dim=pool.head_dim,
        block_size=pool.page_size,
        blocks=pool.page_num,
        strides=dict(zip(axes, views[0].stride(), strict=True)),
    )
    spec = CacheGroup(FULL, layers, pool.head_num, pool.head_dim, dtype, pool.page_size, text)
    return Group(spec, layers, (0, pool.head_num), of_tensors(views, bound))


def _layer(pool: Any, side: Any, layer: int) -> Any:
    """One layer's K or V with the axes of its layout, page first."""
    if pool.layout == "page_head":
        return side[:, :, :, layer]
    if pool.layout == "page_first_direct":
        return side[:, layer]
    slots = side[layer] if pool.layout == "layer_first" else side[:, layer]
    return slots.unflatten(0, (pool.page_num, pool.page_size))


def prove(pool: Any, cache: Cache, io_backend: str) -> None:
    """Prove every layer, by the operation that brings pages from the device to this pool, and leave the pages zeroed.

    Raises LayoutError naming layer and element, or for a pool that has been used already. Of the device's pool only
    page 0 is written, which holds no request's tokens, and has what it had when this returns.
    """
    import torch

    if pool.available_size() != pool.size:
        raise LayoutError(
            "the host pool is in use, so its layout cannot be proven",
            field="hicache-storage-backend",
            remedy="name the backend when the engine starts; this release is not attached to a running one",
        )
    buffers = [*pool.device_k_buffers, *pool.device_v_buffers]
    before = [buffer[: pool.page_size].clone() for buffer in buffers]
    where = buffers[0].device
    slots_of_device = torch.arange(pool.page_size, dtype=torch.int64, device=where)

    def write(layer: int, key_THD: npt.NDArray[Any], value_THD: npt.NDArray[Any], slots: npt.NDArray[np.int64]) -> None:
        for start in range(0, len(slots), pool.page_size):
            of_page = slice(start, start + pool.page_size)
            for buffer in buffers:
                buffer[: pool.page_size] = 0
            for states_THD, of_side in ((key_THD, pool.device_k_buffers), (value_THD, pool.device_v_buffers)):
                states = device.of_elements(np.ascontiguousarray(states_THD[of_page]), pool.dtype)
                of_side[layer][: pool.page_size] = states.to(where)
            slots_of_host = torch.from_numpy(slots[of_page].copy())
            # Where the indices have to be for each way of copying, as SGLang's controller has it.
            staged = pool.layout == "page_first" and pool.can_use_write_back_jit
            pool.backup_from_device_all_layer(
                None,
                slots_of_host.to(where) if io_backend == "kernel" and not staged else slots_of_host,
                slots_of_device if io_backend == "kernel" else slots_of_device.cpu(),
                io_backend,
            )
            if where.type not in device.HOST:
                device.runtime(where).synchronize()

    try:
        proof.prove(cache, write, [f"layer {pool.start_layer + layer}" for layer in range(cache.depth)])
    finally:
        for buffer, content in zip(buffers, before, strict=True):
            buffer[: pool.page_size] = content
