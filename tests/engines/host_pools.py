"""Run in SGLang's environment: its own host pool with each layout that is declared for it, without an engine.

Prints ``LAYOUT IO BACKEND: proven``, or what was refused; `test_sglang_hicache` compares.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from deeplink.errors import LayoutError
from deeplink.kvconnector.layouts.layout import Layout
from deeplink.kvconnector.relayout.plan import Chunk
from sglang_deeplink import host_pool

LAYERS, HEADS, DIM, PAGE, PAGES = 3, 2, 8, 16, 6
WAYS = (
    ("layer_first", "direct"),
    ("layer_first", "kernel"),
    ("page_first", "kernel"),
    ("page_first_direct", "direct"),
    ("page_head", "kernel"),
)


def made(layout: str, dtype: Any, device_layout: Any = KVBufferLayout.NHD) -> tuple[Any, list[Any], list[Any]]:
    """A host pool, and the device's K and V that it is for."""
    k, v = ([torch.zeros(PAGES * PAGE, HEADS, DIM, dtype=dtype) for _ in range(LAYERS)] for _ in range(2))
    pointers = [torch.tensor([one.data_ptr() for one in side], dtype=torch.uint64) for side in (k, v)]
    buffers = KVBuffers(k=tuple(k), v=tuple(v), k_data_ptrs=pointers[0], v_data_ptrs=pointers[1], layout=device_layout)
    info = MHABufferInfo(
        buffers=buffers,
        page_size=PAGE,
        head_num=HEADS,
        head_dim=DIM,
        v_head_dim=DIM,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    pool = MHATokenToKVPoolHost(
        info, 2.0, 0, PAGE, layout, device_capacity_tokens=PAGES * PAGE, start_layer=0, end_layer=LAYERS
    )
    return pool, k, v


def round_trip(layout: str, io_backend: str, dtype: Any) -> str:
    """Proven; and what a device has comes back to it through the wire form."""
    pool, k, v = made(layout, dtype)
    group = host_pool.read(pool)
    host_pool.prove(pool, group.values, io_backend)
    assert pool.available_size() == pool.size
    for buffer in (*k, *v):
        assert not buffer.any()
        buffer.copy_(torch.randn(buffer.shape))
    expected = [buffer.clone() for buffer in (*k, *v)]
    slots_of_host = torch.cat([torch.arange(PAGE) + PAGE * page for page in (5, 2, 7)])
    slots_of_device = torch.cat([torch.arange(PAGE) + PAGE * page for page in (1, 4, 3)])
    pool.backup_from_device_all_layer(None, slots_of_host, slots_of_device, io_backend)
    wire = np.empty(group.values.wire_shape(3 * PAGE), group.values.dtype)
    group.values.gather([5, 2, 7], Chunk(0, 3 * PAGE), wire)
    for layer, (key, value) in enumerate(zip(k, v, strict=True)):
        for side, states in enumerate((key, value)):
            stored = torch.from_numpy(wire[layer, side].view(f"i{wire.itemsize}")).view(dtype)
            assert torch.equal(stored.transpose(0, 1), states[slots_of_device])
    group.values.scatter(wire, 0, [8, 0, 6], Chunk(0, 3 * PAGE))
    slots_of_host = torch.cat([torch.arange(PAGE) + PAGE * page for page in (8, 0, 6)])
    for buffer in (*k, *v):
        buffer.zero_()
    for layer in range(LAYERS):
        pool.load_to_device_per_layer(None, slots_of_host, slots_of_device, layer, io_backend)
    for buffer, right in zip((*k, *v), expected, strict=True):
        assert torch.equal(buffer[slots_of_device], right[slots_of_device])
    return "proven"


def refusals() -> None:
    """What is not as it is said to be."""
    pool, *_ = made("layer_first", torch.float16)
    group = host_pool.read(pool)
    other = Layout.parse("kv | block head token dim").bind(
        heads=HEADS, head_dim=DIM, block_size=PAGE, blocks=pool.page_num
    )
    _refused("another order", lambda: host_pool.prove(pool, replace(group.values, bound=other), "direct"))
    pool.alloc(PAGE)
    _refused("in use", lambda: host_pool.prove(pool, group.values, "direct"))
    shuffled, *_ = made("layer_first", torch.float16, KVBufferLayout.VECTORIZED_5D)
    _refused("shuffled", lambda: host_pool.read(shuffled))
    pool.layout = "page_unified"
    _refused("layout", lambda: host_pool.read(pool))
    _refused("kind", lambda: host_pool.read(SimpleNamespace()))


def _refused(what: str, call: Any) -> None:
    try:
        call()
    except LayoutError as exc:
        print(f"{what}: {exc.field}")
    else:
        print(f"{what}: not refused")


for (layout, io_backend), dtype in itertools.product(WAYS, (torch.float32, torch.bfloat16)):
    print(f"{layout} {io_backend} {dtype}: {round_trip(layout, io_backend, dtype)}")
refusals()
