"""vLLM 0.27: as 0.29, but each attention's implementation decides how the CPU cache is packed, and keeps it."""

from __future__ import annotations

from typing import Any

from vllm_deeplink.versions import v0_29
from vllm_deeplink.versions.expected import COMMON, CPU, Expected
from vllm_deeplink.versions.version import Version


def packing(layer: Any) -> str:
    return str(getattr(layer.impl, "isa", ""))


VERSION = Version(
    name="0.27.1",
    expected=COMMON | v0_29.BY_BLOCKS | Expected(read={f"{CPU}:CPUAttentionBackendImpl": ("isa",)}),
    reports=v0_29.Reports,
    packing=packing,
    several_groups=False,
)
