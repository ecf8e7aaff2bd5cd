"""Which layout an attention backend of vLLM uses, by the name it is registered under (`kvconnector/catalogue.py`)."""

from __future__ import annotations

from deeplink.errors import LayoutError

_CPU_ISA = {"vec": "vllm-cpu-vec", "vec16": "vllm-cpu-vec", "amx": "vllm-cpu-amx"}


def declared(backend: str, isa: str) -> str:
    """The name of the layout a backend declares; it is proven by `probe` before anything relies on it."""
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
