"""A plugin of SGLang: its own transfer backend `mooncake_tcp` on CPU, where the published one asks for pinned memory.

It works there once its sender is not told to copy block tables by way of CUDA. Nothing else is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.disaggregation.utils.get_kv_class", _kv_class, HookType.AROUND)


def _kv_class(original: Callable[[Any, Any], Any], backend: Any, kind: Any) -> Any:
    found = original(backend, kind)
    if kind.value == "sender":
        found.supports_host_tensor_indices = False
    return found
