"""Names for cached pages that engines with other page sizes understand.

SGLang names a page by a hash over its tokens and the page before it, and hands a storage backend these names alone.
Where deeplink's is in use, they are made by `deeplink.kvconnector.prefixes.names` instead, at the one place where
SGLang makes them. Its tree of prefixes exists twice: the one in Python asks there, the one in Rust has the hash built
in.

Imports nothing of SGLang but where it is called: `hooks` puts these functions in its way in every process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from deeplink.kvconnector.prefixes import names as prefix_names

log = logging.getLogger("sglang.deeplink")

MODULE = "sglang_deeplink.hicache"
PYTHON_TREE = "python"

_unit = 0
_tree = ""


def use(unit: int) -> None:
    """From now on pages are named in units of so many tokens; 0 for SGLang's own names."""
    global _unit
    _unit = unit


def tree() -> str:
    """Which tree of prefixes this process has; empty before it has one."""
    return _tree


def hashes(
    original: Callable[..., Any], token_ids: Any, prior_hash: str | None = None, page_size: int | None = None
) -> Any:
    """In the place of SGLang's `get_hash_str`."""
    if not _unit or page_size is None:
        return original(token_ids, prior_hash, page_size)
    read = getattr(token_ids, "raw_token_ids", None)
    tokens = token_ids if read is None else read()
    return prefix_names.pages(tokens[: len(token_ids)], page_size, _unit, prior_hash)


def choose_tree(original: Callable[..., str], name: str, params: Any) -> str:
    """In the place of SGLang's `resolve_tree_core_backend`: the tree in Python, if deeplink's backend is asked for."""
    global _tree
    _tree = original(name, params)
    if _tree != PYTHON_TREE and _wanted():
        log.info("deeplink names cached pages, which needs the tree of prefixes in Python, not the one in %s", _tree)
        _tree = PYTHON_TREE
    return _tree


def _wanted() -> bool:
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
    from sglang.srt.runtime_context import get_memory

    memory = get_memory()
    if memory.hicache_storage_backend != "dynamic":
        return False
    found = HybridCacheController.parse_storage_backend_extra_config(memory.hicache_storage_backend_extra_config)[0]
    return bool(found.get("module_path") == MODULE)
