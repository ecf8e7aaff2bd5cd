"""Plugin discovery. A plugin that fails to load is kept with its exception and shown; none is swallowed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

import pluggy

from deeplink import hookspecs
from deeplink.errors import PluginError
from deeplink.registry import Registry

if TYPE_CHECKING:
    from deeplink.chips.profile import Profile
    from deeplink.kvconnector.transport.base import Transport
    from deeplink.router.kinds import Kind
    from deeplink.router.policy import Policy
    from lmdeploy_deeplink.operators.vendor import Vendor

GROUP = "deeplink"
ONLY = "DEEPLINK_PLUGINS"
DISABLE = "DEEPLINK_DISABLE_PLUGINS"
TRACE = "DEEPLINK_TRACE_PLUGINS"

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Plugins:
    """What was found. `failed` maps an entry-point name to what its import raised."""

    manager: pluggy.PluginManager
    failed: dict[str, Exception] = field(default_factory=dict)
    transports: Registry[Callable[..., Transport]] = field(default_factory=lambda: Registry("transport"))
    layouts: Registry[str] = field(default_factory=lambda: Registry("layout"))
    chips: Registry[Profile] = field(default_factory=lambda: Registry("chip"))
    policies: Registry[Policy] = field(default_factory=lambda: Registry("policy"))
    kinds: Registry[Kind] = field(default_factory=lambda: Registry("kind of engine"))
    operators: Registry[Callable[[], Vendor]] = field(default_factory=lambda: Registry("vendor of operators"))


def load_plugins(found: Iterable[EntryPoint] | None = None) -> Plugins:
    """Load every plugin of the group `deeplink`; call it once per process and keep the result.

    Raises PluginError for a misspelt hook, a name used or registered twice, or a name in DEEPLINK_PLUGINS or
    DEEPLINK_DISABLE_PLUGINS that no plugin has.
    """
    available = _by_name(entry_points(group=GROUP) if found is None else found)
    only, disabled = _names(ONLY, available), _names(DISABLE, available) or set()
    plugins = Plugins(pluggy.PluginManager(GROUP))
    plugins.manager.add_hookspecs(hookspecs)
    if os.environ.get(TRACE):
        plugins.manager.trace.root.setwriter(log.warning)
        plugins.manager.enable_tracing()
    for name, ep in sorted(available.items()):
        if (only is not None and name not in only) or name in disabled:
            continue
        try:
            plugins.manager.register(ep.load(), name=name)
        except Exception as exc:  # noqa: BLE001 - one broken vendor plugin must not take the engine down
            plugins.failed[name] = exc
            log.warning("deeplink plugin %s (%s) did not load: %r", name, ep.value, exc)
    try:
        plugins.manager.check_pending()
    except pluggy.PluginValidationError as exc:
        raise PluginError(f"a deeplink plugin has a hook that does not exist: {exc}") from exc
    plugins.manager.hook.deeplink_register_transports(register=plugins.transports.register)
    plugins.manager.hook.deeplink_register_layouts(register=plugins.layouts.register)
    plugins.manager.hook.deeplink_register_chips(register=plugins.chips.register)
    plugins.manager.hook.deeplink_register_policies(register=plugins.policies.register)
    plugins.manager.hook.deeplink_register_kinds(register=plugins.kinds.register)
    plugins.manager.hook.deeplink_register_operators(register=plugins.operators.register)
    return plugins


def _by_name(found: Iterable[EntryPoint]) -> dict[str, EntryPoint]:
    available: dict[str, EntryPoint] = {}
    for ep in found:
        # One plugin may be listed twice, by two copies of its metadata; two plugins may not share a name.
        other = available.setdefault(ep.name, ep)
        if other.value != ep.value:
            raise PluginError(
                f"two plugins are named {ep.name!r}",
                field="name",
                ours=_origin(other),
                theirs=_origin(ep),
                remedy="uninstall one of them",
            )
    return available


def _origin(ep: EntryPoint) -> str:
    return f"{ep.value} of {ep.dist.name}" if ep.dist is not None else ep.value


def _names(variable: str, available: dict[str, EntryPoint]) -> set[str] | None:
    text = os.environ.get(variable)
    if text is None:
        return None
    names = {name.strip() for name in text.split(",") if name.strip()}
    if unknown := sorted(names - set(available)):
        raise PluginError(
            f"{variable} names {', '.join(unknown)}, which no installed plugin has",
            remedy=f"installed: {', '.join(sorted(available)) or 'none'}",
        )
    return names
