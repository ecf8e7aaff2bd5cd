"""Engines in this environment, by their distributions' metadata: none is imported, which would take seconds and may
start a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import packages_distributions, version

from deeplink import __version__
from deeplink.doctor.model import Finding, Section
from deeplink.doctor.subject import Subject
from deeplink.errors import Reason


@dataclass(frozen=True, slots=True)
class Known:
    """An engine by the module it is imported as, which vendors' builds keep under names of their own. `tested` are the
    release series that the tests ran with."""

    module: str
    tested: tuple[str, ...] = ()


ENGINES = (Known("vllm", ("0.27", "0.29", "0.32")), Known("sglang", ("0.5.23",)), Known("lmdeploy"))
LIBRARIES = {
    "torch": "engines bring their own build",
    "numba": "without it, re-layout and digests are numpy's, which is slower",
}
"""By module, what it means when one is not there."""


def examine(subject: Subject) -> Section:
    return Section("engines", tuple(findings(packages_distributions())))


def findings(installed: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    """`installed` has the distributions of each top-level module."""
    none = True
    for known in ENGINES:
        for name in sorted(set(installed.get(known.module, ()))):
            none = False
            yield judge(known, name, version(name))
    if none:
        looked_for = ", ".join(known.module for known in ENGINES)
        yield Finding("engine", "off", f"none in this environment (looked for {looked_for})")
    for module, without in LIBRARIES.items():
        names = sorted(set(installed.get(module, ())))
        for name in names:
            yield Finding(name, "works", version(name), facts={"module": module, "version": version(name)})
        if not names:
            yield Finding(module, "off", f"not installed; {without}")


def judge(known: Known, distribution: str, found: str) -> Finding:
    facts = {"module": known.module, "version": found, "tested": list(known.tested)}
    if any(found == series or found.startswith((f"{series}.", f"{series}+")) for series in known.tested):
        return Finding(distribution, "works", f"{found}, within what is tested", facts=facts)
    tested = ", ".join(f"{series}.*" for series in known.tested) or "none"
    reason = Reason(
        "untested",
        f"deeplink {__version__} was not tested with this {known.module}",
        f"version of {known.module}",
        found,
        tested,
        f"use {known.module} {tested}" if known.tested else f"this release has no plugin for {known.module}",
    )
    return Finding(distribution, "warning", found, reason, facts)
