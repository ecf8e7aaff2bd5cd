"""The versions of vLLM: one module for what each has of its own, and the choice among them.

    version    what a version module states
    v0_32      what the rest of the plugin is written for; v0_29 and v0_27 say how they differ
    interface  a vLLM's interface, read from its sources
    expected   what of it the plugin relies on, and how another differs

A tested version is taken by its name. Another is taken, with a warning, as the newest one whose interface it has; if it
has none of theirs it is refused by what differs. Nothing here imports vLLM but `current`, so that a test can ask about
versions that are not installed.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path

from deeplink.errors import ConfigError
from vllm_deeplink.versions import interface, v0_27, v0_29, v0_32
from vllm_deeplink.versions.expected import CPU
from vllm_deeplink.versions.interface import Interface
from vllm_deeplink.versions.version import Version

log = logging.getLogger("vllm.deeplink")

TESTED = (v0_32.VERSION, v0_29.VERSION, v0_27.VERSION)
"""The newest first."""

PLACES = tuple(dict.fromkeys(place for version in TESTED for place in version.expected.places))
"""All that is looked at of a vLLM."""


@functools.cache
def current() -> Version:
    """The version that runs here. Raises ConfigError for one whose interface differs from every tested one's."""
    import vllm
    from vllm.platforms import current_platform

    here = interface.read(Path(vllm.__file__).parent, vllm.__version__, PLACES)
    chosen = choose(here, cpu=current_platform.is_cpu())
    if not is_tested(here.version):
        log.warning(
            "vLLM %s is not among the versions that deeplink is tested with (%s). Its interface is that of %s, as far "
            "as deeplink uses it; whether it behaves alike is not known.",
            here.version,
            _names(),
            chosen.name,
        )
    return chosen


def is_tested(version: str) -> bool:
    """Whether a release of this series is (0.32.1 is as 0.32.0 is)."""
    return bool(_same_series(version))


def choose(found: Interface, *, cpu: bool) -> Version:
    """The tested version to take `found` as. Raises ConfigError naming what differs from the most alike.

    `cpu`: it computes on a CPU, and so uses the attention that comes with vLLM for that.
    """
    candidates = _same_series(found.version) or TESTED
    expected = {tested.name: tested.expected if cpu else tested.expected.without(CPU) for tested in candidates}
    differences = {name: one.differences(found) for name, one in expected.items()}
    for tested in candidates:
        if not differences[tested.name]:
            return tested
    nearest = min(candidates, key=lambda tested: (len(differences[tested.name]), _apart(tested.name, found.version)))
    first, *others = differences[nearest.name]
    more = f", and {len(others)} more: {', '.join(other.where for other in others)}" if others else ""
    raise ConfigError(
        f"vLLM {found.version} has another interface than {nearest.name}, the most alike of the tested versions: "
        f"{first}{more}",
        field=first.where,
        ours=first.expected,
        theirs=first.found,
        remedy=f"use vLLM {_names()}",
    )


def _same_series(version: str) -> list[Version]:
    return [tested for tested in TESTED if _apart(tested.name, version) == 0]


def _apart(one: str, other: str) -> int:
    """How many minor releases lie between two versions; one without numbers is far from all."""
    a, b = interface.release(one), interface.release(other)
    return abs(a[1] - b[1]) if len(a) > 1 and len(b) > 1 and a[0] == b[0] else 1000


def _names() -> str:
    return ", ".join(tested.name for tested in reversed(TESTED))
