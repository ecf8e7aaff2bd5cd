"""What SGLang's hierarchical cache needs of a GPU, in plain torch: memory of the host that is registered with nothing,
and the copies between its two pools of pages.

The names and arguments are those of SGLang's kernel package, which its modules do not import on CPU; `install` puts
these there.
"""

from __future__ import annotations

import ctypes
from types import ModuleType
from typing import Any

COMMON = "sglang.srt.mem_cache.pool_host.common"
POOLS = "sglang.srt.mem_cache.pool_host.mha"


def install(module: ModuleType) -> None:
    """Called with each of the two modules once it is imported."""
    if module.__name__ == COMMON:
        module.ALLOC_MEMORY_FUNCS["cpu"] = _allocate
    else:
        for function in COPIES:
            setattr(module, function.__name__, function)


def _allocate(dims: Any, dtype: Any, device: str, pin_memory: bool, allocator: Any, **options: object) -> Any:
    return allocator.allocate(dims, dtype=dtype, device=device)


# The I/O backend `direct` names tensors on both sides.


def transfer_kv_direct(src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    """Slots of each layer, ``[slot, head, dim]`` on both sides."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, layer_id: int, page_size: int
) -> None:
    """One layer, from ``[page, layer, slot, head, dim]`` to ``[slot, head, dim]``; K and V."""
    pages, places = src_indices // page_size, src_indices % page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[pages, layer_id, places]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """All layers, the other way: K of each layer, then V of each."""
    pages, places = dst_indices // page_size, dst_indices % page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for place, source in enumerate(src_ptrs):
        dst_ptrs[place // layers][pages, place % layers, places] = source[src_indices]


# The I/O backend `kernel` names the layers of one side by their addresses, where it copies all of them. `item_size` is
# the bytes of one layer's K of a slot.


def transfer_kv_per_layer(
    src_k: Any, dst_k: Any, src_v: Any, dst_v: Any, src_indices: Any, dst_indices: Any, item_size: int
) -> None:
    transfer_kv_direct([src_k, src_v], [dst_k, dst_v], src_indices, dst_indices, 1)


def transfer_kv_all_layer(
    src_k_layers: Any,
    dst_k_layers: Any,
    src_v_layers: Any,
    dst_v_layers: Any,
    src_indices: Any,
    dst_indices: Any,
    item_size: int,
    num_layers: int,
) -> None:
    for sources, targets in ((src_k_layers, dst_k_layers), (src_v_layers, dst_v_layers)):
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            _rows(target, dst_indices, item_size)[dst_indices] = _rows(source, src_indices, item_size)[src_indices]


def transfer_kv_per_layer_pf_lf(
    src_k: Any,
    dst_k: Any,
    src_v: Any,
    dst_v: Any,
    src_indices: Any,
    dst_indices: Any,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
) -> None:
    """From ``[slot, layer, head, dim]``."""
    for source, target in ((src_k, dst_k), (src_v, dst_v)):
        target[dst_indices] = source[src_indices, layer_id]


def transfer_kv_all_layer_lf_pf(
    src_k_layers: Any,
    dst_k: Any,
    src_v_layers: Any,
    dst_v: Any,
    src_indices: Any,
    dst_indices: Any,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
) -> None:
    for sources, target in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        for layer, source in enumerate(sources.tolist()):
            rows = _rows(source, src_indices, item_size)[src_indices]
            target[dst_indices, layer] = rows.view(target.dtype).view(-1, *target.shape[2:])


def transfer_kv_per_layer_ph_lf(
    src_k: Any,
    dst_k: Any,
    src_v: Any,
    dst_v: Any,
    src_indices: Any,
    dst_indices: Any,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    page_size: int,
    head_num: int,
) -> None:
    """From ``[page, head, slot, layer, dim]``."""
    pages, places = src_indices // page_size, src_indices % page_size
    for source, target in ((src_k, dst_k), (src_v, dst_v)):
        target[dst_indices] = source[pages, :, places, layer_id]


def transfer_kv_all_layer_lf_ph(
    src_k_layers: Any,
    dst_k: Any,
    src_v_layers: Any,
    dst_v: Any,
    src_indices: Any,
    dst_indices: Any,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    page_size: int,
    head_num: int,
) -> None:
    pages, places = dst_indices // page_size, dst_indices % page_size
    for sources, target in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        for layer, source in enumerate(sources.tolist()):
            rows = _rows(source, src_indices, item_size)[src_indices]
            target[pages, :, places, layer] = rows.view(target.dtype).view(-1, head_num, target.shape[-1])


def _rows(address: int, indices: Any, item_size: int) -> Any:
    """The bytes of a layer's slots, up to the last that is named."""
    import torch

    count = int(indices.max()) + 1
    memory = (ctypes.c_uint8 * (count * item_size)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(count, item_size)


COPIES = (
    transfer_kv_direct,
    transfer_kv_per_layer_direct_pf_lf,
    transfer_kv_all_layer_direct_lf_pf,
    transfer_kv_per_layer,
    transfer_kv_all_layer,
    transfer_kv_per_layer_pf_lf,
    transfer_kv_all_layer_lf_pf,
    transfer_kv_per_layer_ph_lf,
    transfer_kv_all_layer_lf_ph,
)
