"""The chips that are known, a module per vendor. One more chip is one more entry in its vendor's `PROFILES`, or a
plugin's `deeplink_register_chips`. A fact that no source was found for stays None."""

from __future__ import annotations

from collections.abc import Callable

from deeplink.chips.catalogue import (
    amd,
    ascend,
    biren,
    cambricon,
    cpu,
    enflame,
    hygon,
    iluvatar,
    intel,
    metax,
    moore_threads,
    nvidia,
    thead,
)
from deeplink.chips.profile import Profile
from deeplink.hookspecs import hookimpl

PROFILES: tuple[Profile, ...] = (
    *ascend.PROFILES,
    *metax.PROFILES,
    *thead.PROFILES,
    *biren.PROFILES,
    *hygon.PROFILES,
    *moore_threads.PROFILES,
    *enflame.PROFILES,
    *iluvatar.PROFILES,
    *cambricon.PROFILES,
    *nvidia.PROFILES,
    *amd.PROFILES,
    *intel.PROFILES,
    *cpu.PROFILES,
)


@hookimpl
def deeplink_register_chips(register: Callable[[str, Profile], None]) -> None:
    for profile in PROFILES:
        register(profile.name, profile)
