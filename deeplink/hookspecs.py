"""The plugin contract: the only file a plugin author has to read.

A plugin is a module (or object) with functions named as below, marked with `deeplink.hookimpl`, and listed in
the entry-point group `deeplink`. Every hook is a callback: it is called once at start with a `register`
function and may call that as often as it likes. A name registered twice is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from deeplink.chips.profile import Profile
    from deeplink.kvconnector.transport.base import Transport
    from deeplink.router.kinds import Kind
    from deeplink.router.policy import Policy
    from lmdeploy_deeplink.operators.vendor import Vendor

hookspec = pluggy.HookspecMarker("deeplink")
hookimpl = pluggy.HookimplMarker("deeplink")


@hookspec
def deeplink_register_transports(register: Callable[[str, Callable[..., Transport]], None]) -> None:
    """Call ``register(name, factory)``; ``factory(host, secret)`` starts the transport on this host.

    Since 0.1. Called in every engine process that holds a KV cache. A factory that raises leaves its transport out of
    what the engine offers to peers; the reason is logged. One whose attribute `capabilities` says that the transport
    does not authenticate is called only with ``trust = "fabric"``.
    """


@hookspec
def deeplink_register_layouts(register: Callable[[str, str], None]) -> None:
    """Call ``register(name, text)`` once per KV-cache layout, in the notation of `deeplink.kvconnector.layouts.layout`.

    Since 0.1. An engine plugin looks its cache's layout up by this name, and proves it at start-up.
    """


@hookspec
def deeplink_register_chips(register: Callable[[str, Profile], None]) -> None:
    """Call ``register(profile.name, profile)`` once per chip; `deeplink.chips.profile` says what a profile holds.

    Since 0.1. Detection and the doctor look through all of them. A profile is data: nothing of the chip's is imported.
    """


@hookspec
def deeplink_register_policies(register: Callable[[str, Policy], None]) -> None:
    """Call ``register(name, policy)``; the router uses it where ``prefill_policy`` or ``decode_policy`` names it.

    Since 0.1. A policy is a pure function of a snapshot (`deeplink.router.policy`), called once or twice a request on
    the router's only thread, so it must be quick.
    """


@hookspec
def deeplink_register_kinds(register: Callable[[str, Kind], None]) -> None:
    """Call ``register(name, kind)``; the router uses it for engines whose ``kind`` is that name.

    Since 0.1. `deeplink.router.kinds` says what a kind does: how an engine is looked at, and how two hand over. The
    names deeplink and plain are the router's own.
    """


@hookspec
def deeplink_register_operators(register: Callable[[str, Callable[[], Vendor]], None]) -> None:
    """Call ``register(name, load)`` once per vendor of fused operators; ``load()`` gives a `Vendor`.

    Since 0.1. `load` is called when the vendor is wanted, not before; that is where its runtime is imported. It raises
    PluginError where the vendor cannot run, saying why. `lmdeploy_deeplink.operators` says what each operator means.
    """
