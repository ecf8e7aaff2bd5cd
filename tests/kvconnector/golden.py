"""The catalogue a second time, as arrays: for each entry the shape of each tensor, and which index an element has.

Written from the engines' shapes (the survey's ``[2, B, N, H, D]`` and the like), not from the layout texts, and used
one element at a time. B, N, H, D are blocks, tokens per block, heads and dim; kv, b, n, h, d an element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Shape = tuple[int, ...]
Place = tuple[int, Shape]
"""Tensor of the layer, and index in it."""


@dataclass(frozen=True)
class Golden:
    shapes: Callable[[int, int, int, int], list[Shape]]
    place: Callable[[int, int, int, int, int], Place]
    H: int = 3
    D: int = 32
    N: int = 32


def one(shape: Callable[..., Shape], index: Callable[..., Shape], **sizes: int) -> Golden:
    """K and V in one tensor."""
    return Golden(lambda B, N, H, D: [shape(B, N, H, D)], lambda *at: (0, index(*at)), **sizes)


def two(shape: Callable[..., Shape], index: Callable[..., Shape], **sizes: int) -> Golden:
    """A tensor for K and one like it for V."""
    return Golden(lambda B, N, H, D: [shape(B, N, H, D)] * 2, lambda kv, b, n, h, d: (kv, index(b, n, h, d)), **sizes)


def rocm(x: int, planes: bool) -> Golden:
    """K ``[B, H, D/x, N, x]`` and V ``[B, H, D, N]``, in planes ``[2, B, …]`` or in each block ``[B, 2, …]``."""

    def index(kv: int, b: int, n: int, h: int, d: int) -> Shape:
        size = 3 * 32 * 32
        inside = (((h * (32 // x) + d // x) * 32 + n) * x + d % x) if kv == 0 else (h * 32 + d) * 32 + n
        assert inside < size
        return (kv, b, inside) if planes else (b, kv, inside)

    return one(lambda B, N, H, D: (2, B, N * H * D) if planes else (B, 2, N * H * D), index)


def vectorized_5d(x: int) -> Golden:
    return Golden(
        lambda B, N, H, D: [(B, H, D // x, N, x), (B, H, N // x, D, x)],
        lambda kv, b, n, h, d: (0, (b, h, d // x, n, d % x)) if kv == 0 else (1, (b, h, n // x, d, n % x)),
    )


def cpu_vec(kv: int, b: int, n: int, h: int, d: int) -> Shape:
    """K ``[32 dims, 32 tokens]``, then V ``[32 tokens, 32 dims]``."""
    return (b, h, d * 32 + n) if kv == 0 else (b, h, 32 * 32 + n * 32 + d)


def cpu_amx(kv: int, b: int, n: int, h: int, d: int) -> Shape:
    """K ``[2, 16, 16 tokens, 2 dims]``, then V ``[2, 16, 16 dims, 2 tokens]``, of 32 tokens and 32 dims."""
    if kv == 0:
        return b, h, (n // 16) * 512 + (d // 2) * 32 + (n % 16) * 2 + d % 2
    return b, h, 1024 + (d // 16) * 512 + (n // 2) * 32 + (d % 16) * 2 + n % 2


def rows(B: int, N: int, H: int, D: int) -> Shape:
    return B, N, D


MLA = {"H": 1, "D": 576, "N": 4}
LATENT_ROPE = Golden(
    lambda B, N, H, D: [(B, N, 1, 512), (B, N, 1, 64)],
    lambda kv, b, n, h, d: (0, (b, n, 0, d)) if d < 512 else (1, (b, n, 0, d - 512)),
    **MLA,
)
PAGES_NHD = two(lambda B, N, H, D: (B, N, H, D), lambda b, n, h, d: (b, n, h, d))
PAGES_HND = two(lambda B, N, H, D: (B, H, N, D), lambda b, n, h, d: (b, h, n, d))
PACKED_HND = one(lambda B, N, H, D: (B, H, N, 2 * D), lambda kv, b, n, h, d: (b, h, n, kv * 32 + d))

GOLDEN = {
    "vllm-nhd": one(lambda B, N, H, D: (B, N, H, 2 * D), lambda kv, b, n, h, d: (b, n, h, kv * 32 + d)),
    "vllm-hnd": PACKED_HND,
    "vllm-head-outermost": one(lambda B, N, H, D: (H, B, N, 2 * D), lambda kv, b, n, h, d: (h, b, n, kv * 32 + d)),
    "vllm-cpu-vec": one(lambda B, N, H, D: (B, H, 2 * N * D), cpu_vec),
    "vllm-cpu-amx": one(lambda B, N, H, D: (B, H, 2 * N * D), cpu_amx),
    "vllm-kv-outermost": one(lambda B, N, H, D: (2, B, N, H, D), lambda kv, b, n, h, d: (kv, b, n, h, d)),
    "vllm-kv-in-block": one(lambda B, N, H, D: (B, 2, N, H, D), lambda kv, b, n, h, d: (b, kv, n, h, d)),
    "vllm-rocm-16bit": rocm(8, planes=False),
    "vllm-rocm-8bit": rocm(16, planes=False),
    "vllm-rocm-planes-16bit": rocm(8, planes=True),
    "vllm-rocm-planes-8bit": rocm(16, planes=True),
    "vllm-mla": one(rows, lambda kv, b, n, h, d: (b, n, d), **MLA),
    "vllm-fp8-ds-mla": one(rows, lambda kv, b, n, h, d: (b, n, d), H=1, D=656, N=4),
    "vllm-ascend-910": PAGES_NHD,
    "vllm-ascend-910-mla": LATENT_ROPE,
    "vllm-ascend-310p": one(
        lambda B, N, H, D: (2, B, H * D // 16, N, 16),
        lambda kv, b, n, h, d: (kv, b, (h * 32 + d) // 16, n, (h * 32 + d) % 16),
    ),
    "vllm-metax-packed": PACKED_HND,
    "sglang-nhd": two(lambda B, N, H, D: (B * N, H, D), lambda b, n, h, d: (b * 32 + n, h, d)),
    "sglang-hnd": PAGES_HND,
    "sglang-vectorized-5d-16bit": vectorized_5d(8),
    "sglang-vectorized-5d-8bit": vectorized_5d(16),
    "sglang-mla": one(lambda B, N, H, D: (B * N, 1, D), lambda kv, b, n, h, d: (b * 4 + n, 0, d), **MLA),
    "sglang-ascend": PAGES_NHD,
    "sglang-ascend-mla": LATENT_ROPE,
    "lmdeploy-cuda": one(
        lambda B, N, H, D: (B, 2 * N * H * D),
        lambda kv, b, n, h, d: (b, kv * 32 * 3 * 32 + (n * 3 + h) * 32 + d),
    ),
    "lmdeploy-contiguous": PAGES_NHD,
    "lmdeploy-cambricon": PAGES_HND,
}
