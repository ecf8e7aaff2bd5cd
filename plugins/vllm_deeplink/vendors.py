"""Vendors' platform plugins: which there are, which of them serve this host, and what is wrong with the others.

vLLM goes on without a platform plugin that fails, on another platform or on none, and says so in a log at most. Who
asked for deeplink is told instead. Imports no vLLM: plugins are looked at as vLLM does it, by their entry points.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from deeplink.errors import PluginError

if TYPE_CHECKING:
    from deeplink.chips.detect import Detected
    from deeplink.chips.profile import Profile, Served

GROUP = "vllm.platform_plugins"
ALLOWED = "VLLM_PLUGINS"
TARGET = "VLLM_TARGET_DEVICE"
OURS = "vllm_deeplink"
ENGINE = "vLLM"


@dataclass(frozen=True, slots=True)
class Platform:
    """One platform plugin. `serves` is the class it offers for this host, None if it finds no device of its own;
    `failure` is what its import, its search for devices or the import of that class raised."""

    name: str
    value: str
    distribution: str
    version: str
    allowed: bool = True
    serves: str | None = None
    failure: Exception | None = None

    def __str__(self) -> str:
        return f"{self.name!r} ({self.value}) of {f'{self.distribution} {self.version}'.strip()}"

    @property
    def stale(self) -> bool:
        """Its metadata is there, and the module that it names is not."""
        missing = self.failure.name if isinstance(self.failure, ModuleNotFoundError) else None
        module = self.value.partition(":")[0]
        return missing is not None and (module == missing or module.startswith(f"{missing}."))


def wants_processor() -> bool:
    return os.environ.get(TARGET, "").lower() == "cpu"


def look(points: Iterable[EntryPoint] | None = None) -> tuple[Platform, ...]:
    """All vendors' platform plugins in this environment, by name. Calls them, as vLLM itself does more than once."""
    text = os.environ.get(ALLOWED)
    allowed = None if text is None else {name.strip() for name in text.split(",")}
    found: dict[tuple[str, str], Platform] = {}
    for point in entry_points(group=GROUP) if points is None else points:
        # One plugin may be listed twice, by two copies of its metadata.
        if point.module.split(".")[0] != OURS and (point.name, point.value) not in found:
            found[point.name, point.value] = _look(point, allowed is None or point.name in allowed)
    return tuple(found[key] for key in sorted(found))


def _look(point: EntryPoint, allowed: bool) -> Platform:
    distribution, version = (point.dist.name, point.dist.version) if point.dist is not None else ("", "")
    serves: str | None = None
    failure: Exception | None = None
    if allowed:
        try:
            serves = point.load()()
            if serves is not None:
                module, _, name = serves.rpartition(".")
                getattr(import_module(module), name)
        except Exception as exc:  # noqa: BLE001 - whatever a vendor's plugin raises is its failure, told below
            failure = exc
    return Platform(point.name, point.value, distribution, version, allowed, serves, failure)


def check(found: Sequence[Platform]) -> Platform | None:
    """The plugin that serves this host; None if no vendor's does.

    Raises PluginError for one that fails, for two of one name, and for two that both want to serve.
    """
    for name, times in Counter(one.name for one in found if one.allowed).items():
        if times > 1:
            raise _two([one for one in found if one.name == name], "vLLM would take either of them")
    for one in found:
        if one.failure is not None:
            raise PluginError(
                f"vLLM's platform plugin {one} fails: {type(one.failure).__name__}: {one.failure}",
                field="platform plugin",
                ours=one.name,
                theirs=repr(one.failure)[:300],
                remedy=_remedy(one),
            ) from one.failure
    serving = [one for one in found if one.serves is not None]
    if len(serving) > 1:
        raise _two(serving, "vLLM runs on one platform, and each of these wants to be it")
    return serving[0] if serving else None


def _two(plugins: Sequence[Platform], why: str) -> PluginError:
    names = sorted({one.name for one in plugins})
    remedy = "uninstall one of " + ", ".join(one.distribution for one in plugins)
    if len(names) > 1:
        remedy += f"; or name what is to be loaded in {ALLOWED}, with deeplink_engine and every other plugin in use"
    return PluginError(
        f"two platform plugins at once: {'; '.join(map(str, plugins))}; {why}",
        field="platform plugin",
        ours=plugins[0].distribution,
        theirs=plugins[1].distribution,
        remedy=remedy,
    )


def _remedy(one: Platform) -> str:
    again = f"pip install --force-reinstall --no-deps {one.distribution}=={one.version}"
    gone = f"pip uninstall {one.distribution}"
    if one.stale:
        return (
            f"its metadata is there, its module is not: an installation that was half removed; {again}, or {gone}, or "
            "delete its .dist-info or .egg-info folder"
        )
    if isinstance(one.failure, ModuleNotFoundError):
        return f"install what has {one.failure.name}, of the version that {one.distribution} asks for; or {gone}"
    if isinstance(one.failure, (ImportError, AttributeError)):
        return (
            f"use the releases of vLLM, torch and the vendor's libraries that {one.distribution} {one.version} was "
            f"built for; or {gone}"
        )
    return f"look at the vendor's driver and libraries; without its devices on this host, {gone}"


def check_served(found: Sequence[Platform], detected: Detected, profiles: Iterable[Profile]) -> None:
    """That no chip here goes unserved, where `check` found no plugin that serves. Raises PluginError.

    Chips count whose device nodes are here: others were not given to this host or container. Whoever wants vLLM on the
    processor beside such a chip says so, with VLLM_TARGET_DEVICE=cpu.
    """
    if wants_processor():
        return
    by_name = {profile.name: profile for profile in profiles}
    usable = [card for vendor in detected.found if vendor.nodes for card in vendor.cards]
    for profile in (by_name[card.chip] for card in usable if card.chip in by_name):
        for served in profile.served:
            if served.engine == ENGINE and served.plugin:
                raise _unserved(profile, served, found)


def _unserved(profile: Profile, served: Served, found: Sequence[Platform]) -> PluginError:
    its = [one for one in found if _same(one.distribution, served.plugin)]
    if not its:
        state, remedy = "is not installed", f"install it: {served.had}"
    elif not its[0].allowed:
        state = f"is left out by {ALLOWED}={os.environ.get(ALLOWED)}"
        remedy = f"add {its[0].name} to {ALLOWED}"
    else:
        state = f"finds no device: {its[0]}"
        remedy = "look at the vendor's driver and libraries"
    return PluginError(
        f"a chip {profile.title} is here, and its plugin {served.plugin} {state}; vLLM would run without the chip",
        field="platform plugin",
        ours="none",
        theirs=served.plugin,
        remedy=f"{remedy}; or, to run on the processor, set {TARGET}=cpu",
    )


def _same(one: str, other: str) -> bool:
    return one.lower().replace("_", "-").replace(".", "-") == other.lower().replace("_", "-").replace(".", "-")
