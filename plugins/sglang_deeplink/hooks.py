"""Everything that is patched in SGLang, in one place.

SGLang takes transfer backends from a closed enumeration, tells them neither the cache's tensors nor the request they
are for, and drops fields of a body that it does not know. Plugins may wrap what they name, which is done here:

    TransferBackend                                  one more member
    get_kv_class                                     the classes for it
    PrefillBootstrapQueue, DecodePreallocQueue       the manager gets the pool, senders and receivers their request
    add_http_request_metrics_middleware              called with the HTTP application, which gets one more middleware
    get_hash_str, resolve_tree_core_backend          what cached pages are called, for the storage backend
    SchedulerWeightUpdaterManager                    the storage backend hears of other weights before they are loaded
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from enum import Enum
from importlib.metadata import version
from typing import Any

log = logging.getLogger("sglang.deeplink")

BACKEND = "deeplink"
TESTED = ("0.5.23",)
FORCE = "DEEPLINK_UNTESTED_SGLANG"
"""Set to 1, other versions are tried."""

_UTILS = "sglang.srt.disaggregation.utils"
_PREFILL = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue"
_DECODE = "sglang.srt.disaggregation.decode.DecodePreallocQueue"
_HTTP = "sglang.srt.observability.http_request_metrics.add_http_request_metrics_middleware"

_HASH = "sglang.srt.mem_cache.utils.get_hash_str"
_TREE = "sglang.srt.mem_cache.unified_cache.tree_core_registry.resolve_tree_core_backend"
_WEIGHTS = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
WEIGHTS_FROM = ("disk", "distributed", "tensor", "ipc")

_installed = False


def install() -> None:
    """Once per process. With an untested version it does nothing but say so: the backend is then no choice."""
    global _installed
    if _installed or not _accepts(version("sglang"), os.environ.get(FORCE, "")):
        return
    _installed = True
    from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices
    from sglang.srt.disaggregation import utils
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_deeplink import naming

    add_disagg_transfer_backend_choices([BACKEND])
    members = {member.name: member.value for member in utils.TransferBackend}
    enumeration = Enum("TransferBackend", {**members, "DEEPLINK": BACKEND}, module=_UTILS)  # type: ignore[misc]
    HookRegistry.register(f"{_UTILS}.TransferBackend", enumeration, HookType.REPLACE)
    HookRegistry.register(f"{_UTILS}.get_kv_class", _kv_class, HookType.AROUND)
    for queue in (_PREFILL, _DECODE):
        HookRegistry.register(f"{queue}._init_kv_manager", _attach, HookType.AROUND)
    HookRegistry.register(f"{_PREFILL}.create_sender", _bind_sender, HookType.AROUND)
    HookRegistry.register(f"{_DECODE}._create_receiver_and_enqueue", _bind_receiver, HookType.AROUND)
    HookRegistry.register(_HTTP, _add_passage, HookType.BEFORE)
    HookRegistry.register(_HASH, naming.hashes, HookType.AROUND)
    HookRegistry.register(_TREE, naming.choose_tree, HookType.AROUND)
    for source in WEIGHTS_FROM:
        HookRegistry.register(f"{_WEIGHTS}.update_weights_from_{source}", _weights_changed, HookType.BEFORE)


def _accepts(found: str, forced: str) -> bool:
    if found in TESTED:
        return True
    tested = ", ".join(TESTED)
    if forced == "1":
        log.warning("deeplink was not tested with SGLang %s (tested: %s); going on, as %s says", found, tested, FORCE)
        return True
    log.error(
        "deeplink hooks into SGLang and was not tested with version %s (tested: %s), so the transfer backend %r is not "
        "there; install a tested version, or set %s=1",
        found,
        tested,
        BACKEND,
        FORCE,
    )
    return False


def _kv_class(original: Callable[[Any, Any], Any], transfer_backend: Any, class_type: Any) -> Any:
    if getattr(transfer_backend, "value", None) != BACKEND:
        return original(transfer_backend, class_type)
    from sglang.srt.disaggregation.base import KVArgs

    from sglang_deeplink.process import DeepLinkKVBootstrapServer, DeepLinkKVManager
    from sglang_deeplink.receiver import DeepLinkKVReceiver
    from sglang_deeplink.sender import DeepLinkKVSender

    classes: dict[str, type] = {
        "kvargs": KVArgs,
        "manager": DeepLinkKVManager,
        "sender": DeepLinkKVSender,
        "receiver": DeepLinkKVReceiver,
        "bootstrap_server": DeepLinkKVBootstrapServer,
    }
    return classes[class_type.value]


def _attach(original: Callable[[Any], Any], queue: Any) -> Any:
    manager = original(queue)
    if queue.transfer_backend.value == BACKEND:
        manager.attach(queue.token_to_kv_pool, queue.metadata_buffers, queue.scheduler)
    return manager


def _bind_sender(original: Callable[..., bool], queue: Any, req: Any, *arguments: Any, **options: Any) -> bool:
    from sglang_deeplink.sender import DeepLinkKVSender

    made = original(queue, req, *arguments, **options)
    if made and isinstance(req.disagg_kv_sender, DeepLinkKVSender):
        req.disagg_kv_sender.bind(req)
    return made


def _bind_receiver(original: Callable[..., Any], queue: Any, req: Any, *arguments: Any, **options: Any) -> Any:
    from sglang_deeplink.receiver import DeepLinkKVReceiver

    if req.bootstrap_host is None and queue.transfer_backend.value == BACKEND:
        # SGLang takes it for a name without looking, which ends its scheduler.
        req.bootstrap_host = ""
    made = original(queue, req, *arguments, **options)
    if isinstance(made.kv_receiver, DeepLinkKVReceiver):
        made.kv_receiver.bind(req)
    return made


def _add_passage(app: Any) -> None:
    from sglang_deeplink.passage import Passage

    app.add_middleware(Passage)


def _weights_changed(*arguments: Any, **options: Any) -> None:
    # Imported by then where it is in use, and nothing to tell where it is not.
    if (hicache := sys.modules.get("sglang_deeplink.hicache")) is not None:
        hicache.weights_changed()
