"""The start-up proof on tensors of a device, in orders and types that an engine on one has.

Needs no test framework, because an engine's Python runs it, where there is torch but no pytest:

    python probe_check.py
"""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace
from typing import Any

import torch
from fake_device import installed

from deeplink.errors import LayoutError
from deeplink.kvconnector.caches.device_cache import DeviceCache, of_tensors
from deeplink.kvconnector.layouts.catalogue import ENTRIES
from deeplink.kvconnector.layouts.layout import Layout
from vllm_deeplink import layouts, probe

BLOCKS, HEADS, TOKENS, DIM = 6, 2, 16, 32
KINDS = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
ORDERS = {"vllm-hnd": (0, 1, 2, 3), "vllm-nhd": (0, 2, 1, 3)}
"""Of the axes block, head, token, content, from the outermost in memory."""


class Attention:
    """Writes K and V as an attention on a device does: by their slots, in whatever order the tensor has its axes."""

    def __init__(self, dtype: str, swapped: bool) -> None:
        self.impl = self
        self._k_scale_float, self._v_scale_float = (0.5, 2.0) if "float8" in dtype else (1.0, 1.0)
        self._kind = KINDS[dtype]
        self._swapped = swapped

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        scaled = (key.float() / self._k_scale_float, value.float() / self._v_scale_float)
        sides = [side.to(self._kind).view(cache.dtype) for side in (scaled[::-1] if self._swapped else scaled)]
        for place, slot in enumerate(slots.tolist()):
            at = cache[slot // TOKENS, :, slot % TOKENS]
            at[:, :DIM], at[:, DIM:] = sides[0][place], sides[1][place]


def prove(dtype: str, name: str, swapped: bool) -> None:
    """Raises LayoutError."""
    order = ORDERS[name]
    sizes = [(BLOCKS, HEADS, TOKENS, 2 * DIM)[axis] for axis in order]
    stored = torch.uint8 if "float8" in dtype else KINDS[dtype]
    tensor = torch.zeros(sizes, dtype=stored).permute([order.index(axis) for axis in range(4)])
    assert layouts.by_strides(tensor.shape, tensor.stride()) == name
    bound = Layout.parse(text(name)).bind(heads=HEADS, head_dim=DIM, block_size=TOKENS, blocks=BLOCKS)
    cache = of_tensors([tensor], bound)
    assert isinstance(cache, DeviceCache)
    config: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"layer": Attention(dtype, swapped)}),
        model_config=SimpleNamespace(dtype=torch.float32 if stored is torch.uint8 else stored),
    )
    try:
        probe.prove(config, cache, {"layer": tensor}, dtype)
    finally:
        assert not tensor.view(torch.uint8).any()  # as an engine expects it


def text(name: str) -> str:
    return next(entry.layout for entry in ENTRIES if entry.name == name)


def main() -> None:
    proofs = 0
    with installed():
        for dtype, name in itertools.product(KINDS, ORDERS):
            prove(dtype, name, swapped=False)
            proofs += 1
            with contextlib.suppress(LayoutError):
                prove(dtype, name, swapped=True)
                raise SystemExit(f"V and K of {dtype} in {name} were taken for K and V")
            proofs += 1
    print(f"{proofs} proofs")


if __name__ == "__main__":
    main()
