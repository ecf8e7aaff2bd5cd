"""What was found, in lines: for `deeplink doctor` and `deeplink chips`. Pure.

A line's fields are those of the doctor's findings, so that each becomes one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any, Literal

import msgspec

from deeplink.chips.cards import GUEST, Card
from deeplink.chips.detect import Detected, Found
from deeplink.chips.profile import Profile
from deeplink.errors import Reason

Standing = Literal["works", "off", "warning"]


class Line(msgspec.Struct, frozen=True):
    """`standing` is of what was detected, not a trial of it: `off` is not for an engine, as far as is known, and that
    is all right; `warning` is not known for certain, or looks unusable. `facts` has for scripts what `text` says, and
    more."""

    name: str
    standing: Standing
    text: str
    reason: Reason | None = None
    facts: dict[str, Any] = {}


def lines(detected: Detected, profiles: Iterable[Profile]) -> tuple[Line, ...]:
    known = {profile.name: profile for profile in profiles}
    found = [line for one in detected.found for line in _vendor(one, known)]
    if not found:
        found = [Line("accelerator", "off", "none", facts={"reasons": list(detected.reasons)})]
    return (_cpu(detected, known), *found)


def _cpu(detected: Detected, known: dict[str, Profile]) -> Line:
    cpu = detected.cpu
    profile = known.get(detected.cpu_chip or "")
    sets = ", ".join((*cpu.isa, *cpu.amx)) or "no instruction set that is known"
    text = f"{cpu.model or 'a processor without a name'}, {cpu.cores} cores; {sets}"
    facts = {**asdict(cpu), "chip": detected.cpu_chip, "served": _served(profile)}
    return Line(profile.title if profile else "CPU", "works", text, facts=facts)


def _vendor(one: Found, known: dict[str, Profile]) -> Iterator[Line]:
    kinds: dict[tuple[str | None, str, tuple[str, ...]], list[Card]] = {}
    for card in one.cards:
        kinds.setdefault((card.chip, card.model or card.pci, card.reasons), []).append(card)
    for (chip, called, _), cards in kinds.items():
        yield _kind(one, known.get(chip or ""), called, cards)
    if not one.cards:
        text = "; ".join(one.reasons)
        reason = Reason("chip_unknown", text, "chip", remedy="install the vendor's own tool, or pass the device in")
        yield Line(one.vendor, "warning", text, reason, {"vendor": one.vendor, "asked": _plain(one.asked)})


def _kind(one: Found, profile: Profile | None, called: str, cards: list[Card]) -> Line:
    card = cards[0]
    parts = [f"{len(cards)} x {called or 'a card without a name'}"]
    if sizes := sorted({c.memory_mib for c in cards if c.memory_mib}):
        parts.append(" and ".join(f"{size} MiB" for size in sizes))
    parts += [f"{who} {version}" for who, version in one.drivers.items()] or ["no driver's version"]
    if profile and profile.served:
        parts.append("; ".join(f"{s.engine}: {s.plugin or 'no plugin needed'}" for s in profile.served))
    reasons = [*card.reasons, *one.reasons]
    standing, reason = _standing(one, profile, card)
    facts = {
        "vendor": one.vendor,
        "chip": profile.name if profile else None,
        "cards": [_plain(c) for c in cards],
        "nodes": list(one.nodes),
        "drivers": dict(one.drivers),
        "asked": _plain(one.asked),
        "reasons": reasons,
        "served": _served(profile),
    }
    return Line(profile.title if profile else f"{one.vendor} (not known)", standing, ", ".join(parts), reason, facts)


def _standing(one: Found, profile: Profile | None, card: Card) -> tuple[Standing, Reason | None]:
    if profile is None:
        if card.screen and "tool" not in card.how:
            return "off", None
        message = "; ".join(card.reasons) or "no profile describes it"
        remedy = "a plugin can describe it: deeplink_register_chips; its engine may serve all the same"
        return "warning", Reason("chip_unknown", message, "chip", card.model or card.pci, "", remedy)
    if card.driver == GUEST:
        return "off", None
    if "bus" in card.how and not card.driver:
        return "warning", Reason(
            "chip_unusable", "no driver is bound to it", "driver", remedy="load the vendor's driver"
        )
    if "bus" in card.how and not one.nodes:
        why = "it is on the bus, but its device nodes are not here"
        return "warning", Reason("chip_unusable", why, "nodes", remedy="pass the devices into the container")
    return "works", None


def _served(profile: Profile | None) -> list[dict[str, Any]]:
    served = profile.served if profile else ()
    return [{**_plain(one), "source": one.source.where} for one in served]


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value)
