"""What SGLang's hierarchical cache needs of a GPU, in plain torch: memory of the host that is registered with nothing,
and the copies between its two pools of pages.

The names and arguments are those of SGLang's kernel package, which its modules do not import on CPU; `install` puts
these there.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

COMMON = "sglang.srt.mem_cache.pool_host.common"
POOLS = "sglang.srt.mem_cache.pool_host.mha"


def install(module: ModuleType) -> None:
    """Called with each of the two modules once it is imported."""
    if module.__name__ == COMMON:
        module.ALLOC_MEMORY_FUNCS["cpu"] = _allocate
    else:
        for function in (
            transfer_kv_direct,
            transfer_kv_per_layer_direct_pf_lf,
            transfer_kv_all_layer_direct_lf_pf,
        ):
            setattr(module, function.__name__, function)


def _allocate(dims: Any, dtype: Any, device: str, pin_memory: bool, allocator: Any, **options: object) -> Any:
    return allocator.allocate(dims, dtype=dtype, device=device)


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
