"""The layouts vLLM uses, and which attention backend uses which.

Sources: `vllm/v1/kv_cache_layout.py` for the logical order [layer, block, head, token, K|V]; the CPU kernel
`csrc/cpu/cpu_attn*.hpp` for the packings, as measured by writing through `ops.cpu_attn_reshape_and_cache`.
"""

from __future__ import annotations

from collections.abc import Callable

from deeplink.errors import LayoutError
from deeplink.hookspecs import hookimpl

NHD = "block token head (kv dim)"
HND = "block head token (kv dim)"
CPU_VEC = "block head (k: dim token | v: token dim)"
CPU_AMX = "block head (k: token/16 dim/2 token%16 dim%2 | v: dim/16 token/2 dim%16 token%2)"

LAYOUTS = {"vllm-nhd": NHD, "vllm-hnd": HND, "vllm-cpu-vec": CPU_VEC, "vllm-cpu-amx": CPU_AMX}

_CPU_ISA = {"vec": CPU_VEC, "vec16": CPU_VEC, "amx": CPU_AMX}


def declared(backend: str, isa: str) -> str:
    """The layout a backend declares; it is proven by `probe` before anything relies on it."""
    if backend == "CPU_ATTN":
        if isa in _CPU_ISA:
            return _CPU_ISA[isa]
        raise LayoutError(
            f"vLLM's CPU attention packs its cache for {isa!r}, which this release does not know",
            field="layout",
            theirs=isa,
            remedy=f"known: {', '.join(_CPU_ISA)}",
        )
    raise LayoutError(
        f"the attention backend {backend} has a cache layout this release does not know",
        field="layout",
        theirs=backend,
        remedy="this release reads caches in host memory, with the backend CPU_ATTN",
    )


@hookimpl
def deeplink_register_layouts(register: Callable[[str, str], None]) -> None:
    for name, text in LAYOUTS.items():
        register(name, text)
