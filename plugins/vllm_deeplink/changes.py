"""What gives a running engine other weights, of which its contract does not know.

vLLM has whoever owns an engine call any method of its workers by name: `collective_rpc`, of an `LLM`, and over HTTP
with VLLM_SERVER_DEV_MODE. Some load other weights (`reload_weights`, `apply_model`, what an extension of the worker's
class adds), and none says so. Such calls come through the engine core's method of that name; vLLM's own calls to its
workers do not. Adapters are loaded through another one.

Not seen: what a program does to a model that it holds in its own process, past vLLM's methods.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from deeplink.errors import ConfigError
from vllm_deeplink import identity

HARMLESS = frozenset(
    {
        "check_health",
        "get_model_inspection",
        "list_loras",
        "profile",
        "release_late_interaction_query_cache",
        "save_sharded_state",
    }
)
"""Methods of vLLM's workers that leave the weights as they are. Of all others that is not known."""

CALLS, ADAPTERS = "collective_rpc", "add_lora"

_watching: list[Callable[[str], None]] = []


def watch(changed: Callable[[str], None]) -> None:
    """Before a call that may change weights is made in this process, call `changed` with the method's name, in the
    engine core's own thread, between two of its steps. Raises ConfigError for a vLLM without what is watched here."""
    from vllm.v1.engine.core import EngineCore

    install(EngineCore)
    _watching.append(changed)


def forget(changed: Callable[[str], None]) -> None:
    if changed in _watching:
        _watching.remove(changed)


def install(core: Any) -> None:
    """Wrap the methods of vLLM's class, once."""
    if "_deeplink" in vars(core):
        return
    for name in (CALLS, ADAPTERS):
        if not callable(getattr(core, name, None)):
            raise ConfigError(
                "this vLLM has no such method, so deeplink would not hear when other weights are loaded",
                field=f"EngineCore.{name}",
                remedy="use a tested version of vLLM",
            )
    call, add = getattr(core, CALLS), getattr(core, ADAPTERS)

    @functools.wraps(call)
    def collective_rpc(self: Any, method: Any, *arguments: Any, **options: Any) -> Any:
        if method not in HARMLESS:
            name = method if isinstance(method, str) else getattr(method, "__qualname__", type(method).__qualname__)
            for changed in tuple(_watching):
                changed(name)
        return call(self, method, *arguments, **options)

    @functools.wraps(add)
    def add_lora(self: Any, lora_request: Any) -> Any:
        identity.note(lora_request)
        return add(self, lora_request)

    core.collective_rpc, core.add_lora, core._deeplink = collective_rpc, add_lora, True
