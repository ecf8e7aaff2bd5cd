"""Which layout an attention backend of vLLM uses, by the name it is registered under
(`kvconnector/layouts/catalogue.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

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
        remedy="of caches in host memory this release reads those of the backend CPU_ATTN",
    )


def by_strides(shape: Sequence[int], strides: Sequence[int]) -> str:
    """The name of the layout of a tensor ``[block, head, token, K and V]`` on a device, where K and V of a token and
    head lie side by side, and the order of the axes in memory is what differs. It is proven by `probe`, too."""
    _, heads, tokens, content = shape
    known = {
        "vllm-hnd": (heads * tokens * content, tokens * content, content, 1),
        "vllm-nhd": (heads * tokens * content, content, heads * content, 1),
    }
    for name, expected in known.items():
        # An axis of one has any stride.
        if all(size == 1 or a == b for size, a, b in zip(shape, strides, expected, strict=True)):
            return name
    raise LayoutError(
        f"a cache tensor of shape {tuple(shape)} has an order in memory that this release does not know",
        field="strides",
        ours=f"{known['vllm-hnd']} or {known['vllm-nhd']}",
        theirs=str(tuple(strides)),
    )
