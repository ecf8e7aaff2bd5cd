"""Which chips are here. Reads the device tree, and asks a vendor's own tool only where the tree shows that vendor.

The bus says which chip it is wherever its number is known; the tool adds memory and what only a name tells. A tool that
is slow costs `seconds`, once for all of them, and leaves what the tree says. Nothing here starts a device or imports a
vendor's runtime, and nothing raises for what a host is like: what is not known has a reason instead.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from deeplink.chips import cpuinfo, tool, tree
from deeplink.chips.cards import GUEST, Card, cards
from deeplink.chips.cpuinfo import Cpu
from deeplink.chips.output import MalformedOutput
from deeplink.chips.profile import Profile, Reported, Vendor
from deeplink.chips.tool import Answer, Ending, Runner
from deeplink.chips.tree import Function
from deeplink.errors import PluginError

TOOL_SECONDS = 0.12
"""Of the 200 ms that detection may cost. Some tools need a second: give more where there is time."""


@dataclass(frozen=True, slots=True)
class Asked:
    """How a vendor's tool answered. `detail` is empty only when it answered and was understood."""

    command: str
    ending: Ending
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """What there is of one vendor. `drivers` maps who says so (a kernel module, a file, a tool) to a version."""

    vendor: str
    cards: tuple[Card, ...]
    nodes: tuple[str, ...]
    drivers: dict[str, str] = field(default_factory=dict)
    asked: tuple[Asked, ...] = ()
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Detected:
    cpu: Cpu
    cpu_chip: str | None
    found: tuple[Found, ...]
    reasons: tuple[str, ...]
    milliseconds: float


@dataclass(frozen=True, slots=True)
class _Signs:
    """What the device tree shows of one vendor."""

    vendor: Vendor
    functions: tuple[Function, ...]
    nodes: tuple[str, ...]
    control: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.functions or self.nodes or self.control)

    @property
    def driven(self) -> bool:
        return bool(self.nodes or self.control or {f.driver for f in self.functions} - {"", GUEST})


def detect(
    profiles: Iterable[Profile],
    root: Path = Path("/"),
    run: Runner = tool.run,
    seconds: float = TOOL_SECONDS,
) -> Detected:
    """Raises PluginError only, where two profiles describe one vendor differently."""
    start, profiles = time.perf_counter(), tuple(profiles)
    vendors = _vendors(profiles)
    functions = tree.functions(root, vendors)
    shown = [signs for vendor in vendors if (signs := _signs(root, vendor, functions))]
    answers = _ask([signs for signs in shown if signs.driven], run, seconds)
    found = tuple(_found(root, signs, profiles, *answers.get(signs.vendor.name, ((), ()))) for signs in shown)
    processor = cpuinfo.cpu(root)
    fits = [profile.name for profile in profiles if profile.cpu and processor.has(profile.cpu)]
    reasons = () if functions is not None else (f"/{tree.PCI_DEVICES} is not here, so the bus says nothing",)
    spent = (time.perf_counter() - start) * 1000
    return Detected(processor, fits[0] if fits else None, found, reasons, round(spent, 3))


def _vendors(profiles: Iterable[Profile]) -> list[Vendor]:
    found: dict[str, Vendor] = {}
    for profile in profiles:
        if profile.vendor is not None and found.setdefault(profile.vendor.name, profile.vendor) != profile.vendor:
            raise PluginError(
                f"two chip profiles describe the vendor {profile.vendor.name!r} differently",
                field="vendor",
                theirs=profile.name,
                remedy="use the vendor of deeplink's own catalogue, or another name",
            )
    return list(found.values())


def _signs(root: Path, vendor: Vendor, functions: Sequence[Function] | None) -> _Signs:
    """A control node alone says little: Hygon's driver may make AMD's. It counts where the bus cannot say better."""
    its = tree.of_vendor(functions or (), vendor)
    silent = functions is None or not vendor.pci
    control = tree.control_nodes(root, vendor) if its or silent else ()
    return _Signs(vendor, its, tree.nodes(root, vendor, its), control)


Answers = tuple[tuple[Reported, ...], tuple[Asked, ...]]


def _ask(shown: Sequence[_Signs], run: Runner, seconds: float) -> dict[str, Answers]:
    if not shown:
        return {}
    deadline = time.monotonic() + seconds

    def ask(signs: _Signs) -> Answers:
        asked: list[Asked] = []
        for one in signs.vendor.tools:
            answer = run(one.command, max(0.0, deadline - time.monotonic()), one.elsewhere)
            answer, reported = _read(answer, one.read)
            asked.append(Asked(" ".join(one.command[:1]), answer.ending, answer.detail))
            if not answer.detail:
                return reported, tuple(asked)
        return (), tuple(asked)

    if len(shown) == 1:
        return {shown[0].vendor.name: ask(shown[0])}
    with ThreadPoolExecutor(len(shown)) as pool:
        return dict(zip((signs.vendor.name for signs in shown), pool.map(ask, shown), strict=True))


def _read(answer: Answer, read: object) -> tuple[Answer, tuple[Reported, ...]]:
    assert callable(read)
    if answer.ending != "answered":
        return Answer(answer.ending, detail=answer.detail or answer.ending), ()
    try:
        return answer, read(answer.text)
    except MalformedOutput as exc:
        return Answer("answered", detail=f"what it printed is not understood: {exc}"), ()


def _found(
    root: Path,
    signs: _Signs,
    profiles: Iterable[Profile],
    reported: tuple[Reported, ...],
    asked: tuple[Asked, ...],
) -> Found:
    its = [profile for profile in profiles if profile.vendor == signs.vendor]
    drivers = tree.driver_versions(root, signs.vendor, {f.driver for f in signs.functions if f.driver})
    said = sorted({one.driver for one in reported if one.driver})
    if said:
        drivers[asked[-1].command] = ", ".join(said)
    return Found(
        signs.vendor.name,
        cards(its, signs.functions, signs.nodes, reported),
        signs.nodes,
        drivers,
        asked,
        _reasons(signs, reported, asked),
    )


def _reasons(signs: _Signs, reported: Sequence[Reported], asked: Sequence[Asked]) -> tuple[str, ...]:
    reasons = [f"{one.command}: {one.detail}" for one in asked if one.detail]
    if not signs.driven:
        reasons.append("its tool was not asked: no driver of its is loaded here")
    usable = [f for f in signs.functions if f.driver not in ("", GUEST)]
    if usable and not signs.nodes:
        reasons.append("on the bus, but there is no device node: it is not passed into this container")
    elif 0 < len(signs.nodes) < len(usable):
        reasons.append(f"{len(usable)} on the bus, device nodes of {len(signs.nodes)}: the others are not passed in")
    if not (signs.functions or signs.nodes or reported):
        reasons.append(f"{', '.join(signs.control)} is here, but nothing that says which cards, or how many")
    return tuple(reasons)
