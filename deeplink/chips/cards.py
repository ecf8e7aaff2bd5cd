"""One vendor's devices: what the bus and the tool say of each, and which profile that is. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deeplink.chips.profile import Profile, Reported
from deeplink.chips.tree import Function

GUEST = "vfio-pci"
SCREEN = "0300"
"""The class of a card that is for a screen first."""


@dataclass(frozen=True, slots=True)
class Card:
    """One device. `chip` is the name of its profile, or None with a reason; `model` what the tool calls it, or "".

    `how` says what it was seen by: bus, tool, node. `reasons` are why its chip is not known, or why it is of no use.
    """

    chip: str | None
    model: str = ""
    address: str = ""
    pci: str = ""
    driver: str = ""
    memory_mib: int | None = None
    screen: bool = False
    how: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()


def cards(
    its: Sequence[Profile], functions: Sequence[Function], nodes: Sequence[str], reported: Sequence[Reported]
) -> tuple[Card, ...]:
    """The devices of one vendor. `its` are its profiles. What the bus and the tool list at one address is one card, or
    as many as the tool lists there; device nodes count only where there is neither."""
    if not functions:
        if reported:
            return tuple(_card(its, None, one) for one in reported)
        why = ("a device node says the vendor, not the chip",)
        return (Card(None, how=("node",), reasons=why),) * len(nodes)
    at: dict[str, list[Reported]] = {}
    for one in reported:
        at.setdefault(one.address, []).append(one)
    if list(at) == [""] and len(reported) == len(functions):  # a tool that says no address counts as the bus does
        at = {function.address: [one] for function, one in zip(functions, reported, strict=True)}
    found = []
    for function in functions:
        entries: Sequence[Reported | None] = at.pop(function.address, ()) or (None,)
        found += [_card(its, function, one) for one in entries]
    return (*found, *(_card(its, None, one) for left in at.values() for one in left))


def _card(its: Sequence[Profile], function: Function | None, one: Reported | None) -> Card:
    model = one.model if one else ""
    profile, reasons = identify(its, function.device if function else None, model)
    if function and function.driver == GUEST:
        reasons.append(f"bound to {GUEST}: it is passed to a guest")
    elif function and not function.driver:
        reasons.append("no driver is bound to it")
    return Card(
        profile.name if profile else None,
        model,
        function.address if function else one.address if one else "",
        f"{function.vendor:04x}:{function.device:04x}" if function else "",
        function.driver if function else "",
        one.memory_mib if one else None,
        bool(function and function.kind.startswith(SCREEN)),
        (*(("bus",) if function else ()), *(("tool",) if one else ())),
        tuple(reasons),
    )


def identify(its: Sequence[Profile], device: int | None, model: str) -> tuple[Profile | None, list[str]]:
    """Which of a vendor's profiles a card's number on the bus and its name mean, and what is odd about that. A name
    says more than a number, which several models may share."""
    named = [profile for profile in its if model and profile.is_model(model)]
    numbered = [profile for profile in its if device is not None and profile.is_device(device)]
    reasons = []
    if model and not named:
        reasons.append(f"no profile knows a model {model!r}")
    if device is not None and not numbered and not named:
        reasons.append(f"no profile knows the number {device:04x} on the bus")
    elif named and numbered and named[0] not in numbered:
        reasons.append(f"its number on the bus, {device:04x}, is that of {numbered[0].title}")
    fits = named or numbered
    if len(fits) > 1:
        reasons.append(f"it may be {' or '.join(profile.title for profile in fits)}")
    if device is None and not model:
        reasons.append("neither a number on the bus nor a name is known")
    return (fits[0] if len(fits) == 1 else None), reasons
