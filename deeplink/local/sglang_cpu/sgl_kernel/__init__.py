"""What SGLang imports of its kernel package when it runs on CPU, in plain torch.

The package of this name is published for CUDA only. SGLang's CPU platform needs two functions of it; all other names
are imported and never called by dense models, so they raise when they are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

__version__ = "0.4.10"


def assign_req_to_token_pool_cpu(
    rows: Any, table: Any, starts: Any, stops: Any, locations: Any, pool_width: int
) -> None:
    """Write each request's new cache locations into its row of the table of tokens, one after the other."""
    taken = 0
    for row, start, stop in zip(rows.tolist(), starts.tolist(), stops.tolist(), strict=False):
        table[row, start:stop] = locations[taken : taken + stop - start].to(table.dtype)
        taken += stop - start


def copy_all_layer_kv_cache_cpu(addresses: Any, strides: Any, targets: Any, sources: Any) -> None:
    """Copy slots of every layer's cache, in the order given."""
    for address, stride in zip(addresses.tolist(), strides.tolist(), strict=True):
        for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
            ctypes.memmove(address + target * stride, address + source * stride, stride)


def __getattr__(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*arguments: object, **options: object) -> None:
        raise RuntimeError(f"SGLang called sgl_kernel.{name}, which needs a GPU: choose settings that do without it")

    return missing
