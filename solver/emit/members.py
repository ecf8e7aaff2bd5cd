"""The single engines of a placement, each with a name, chips, and what is known of starting it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from deeplink.chips.profile import Profile, Served
from deeplink.solver.kinds import DEFAULT, TITLES, profile_of
from deeplink.solver.placement import Engine, Placement

_NAME = 40
"""Of the 63 characters of a DNS label, so that there is room for what is added to one: here a number, and by Kubernetes
the numbers and the revision of a pod."""


@dataclass(frozen=True, slots=True)
class Member:
    """One engine. `chips` are its chips' numbers within their pool, which is one host or several alike. `label` is its
    name as a DNS label, and `profile` what is known of its chip, None if nothing is."""

    name: str
    label: str
    engine: Engine
    chips: range
    profile: Profile | None

    @property
    def chip_label(self) -> str:
        """The chip's name as a label: nodes are called by it."""
        return self.profile.name if self.profile else _label(self.engine.chip)

    @property
    def host_label(self) -> str:
        """The chip's name as a label and, where that is not vLLM, the engine's: images, their files, and what says on
        which of a cluster's hosts an engine is installed are called by it."""
        return self.chip_label if self.engine.kind == DEFAULT else f"{self.chip_label}-{self.engine.kind}"

    @property
    def title(self) -> str:
        """What its kind of engine is called."""
        return TITLES[self.engine.kind]

    @property
    def processor(self) -> bool:
        return self.profile is not None and self.profile.vendor is None

    @property
    def served(self) -> Served | None:
        """How the engine runs on the chip."""
        known = self.profile.served if self.profile else ()
        return next((one for one in known if one.engine == self.title), None)

    @property
    def visible(self) -> str:
        """The variable that tells a process its devices, or ""."""
        vendor = self.profile.vendor if self.profile else None
        return vendor.visible.value if vendor and vendor.visible else ""

    @property
    def resource(self) -> str:
        """What Kubernetes calls one of its devices, or ""."""
        if self.profile is None:
            return ""
        found = self.profile.resource or (self.profile.vendor.resource if self.profile.vendor else None)
        return found.value if found else ""


def members(placement: Placement, profiles: Mapping[str, Profile]) -> tuple[Member, ...]:
    """In the placement's order. Chips are given out in order within a pool."""
    return tuple(_members(placement, profiles))


def of_entry(members_: tuple[Member, ...]) -> dict[str, tuple[str, ...]]:
    """The names of the engines of each of the placement's entries, by its name."""
    found: dict[str, tuple[str, ...]] = {}
    for member in members_:
        found[member.engine.name] = (*found.get(member.engine.name, ()), member.name)
    return found


def _members(placement: Placement, profiles: Mapping[str, Profile]) -> Iterator[Member]:
    taken: set[str] = set()
    next_chip: dict[str, int] = {}
    for engine in placement.engines:
        for index in range(engine.count):
            first = next_chip.get(engine.pool, 0)
            next_chip[engine.pool] = first + engine.tp
            name = f"{engine.name}-{index}" if engine.count > 1 else engine.name
            label = _free(_label(engine.name), f"-{index}" if engine.count > 1 else "", taken)
            profile = profile_of(engine.chip, engine.profile, profiles)
            yield Member(name, label, engine, range(first, first + engine.tp), profile)


def _free(label: str, end: str, taken: set[str]) -> str:
    number = 1
    while (name := f"{label}{f'-x{number}' if number > 1 else ''}{end}") in taken:
        number += 1
    taken.add(name)
    return name


def _label(text: str) -> str:
    """Lower-case letters, digits and hyphens; begins with a letter."""
    found = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:_NAME].strip("-")
    return found if found[:1].isalpha() else f"e-{found}".rstrip("-")
