"""What the doctor finds, as data: for people a table, for scripts JSON and an exit code. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from deeplink import __version__
from deeplink.errors import DeeplinkError, Reason

Standing = Literal["works", "off", "warning", "failed", "unknown"]
"""`off` is not here, or not asked for, and nothing is wrong with that; `warning` works for all that is known, but
someone should look; `unknown` could not be tried."""
WORKS, FAILED, UNKNOWN = 0, 1, 2
MAX_MESSAGE = 2000
"""Characters. Some libraries answer with a page of usage."""


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at. `reason` says why it is not all right; `facts` has for scripts what `text` says."""

    name: str
    standing: Standing
    text: str = ""
    reason: Reason | None = None
    facts: dict[str, Any] = {}


class Section(msgspec.Struct, frozen=True):
    name: str
    findings: tuple[Finding, ...]


class Diagnosis(msgspec.Struct, frozen=True):
    """All of it. `exit_code` is 1 when anything failed, else 2 when anything could not be told, else 0."""

    deeplink: str
    exit_code: int
    sections: tuple[Section, ...]


def diagnose(sections: Iterable[Section]) -> Diagnosis:
    found = tuple(sections)
    standings = {finding.standing for section in found for finding in section.findings}
    code = FAILED if "failed" in standings else UNKNOWN if "unknown" in standings else WORKS
    return Diagnosis(__version__, code, found)


def reason_of(problem: Exception, remedy: str = "") -> Reason:
    """`remedy` is for a problem that brings none."""
    if isinstance(problem, DeeplinkError):
        reason = problem.reason()
    else:
        reason = Reason(type(problem).__name__, str(problem) or repr(problem))
    return msgspec.structs.replace(reason, message=reason.message[:MAX_MESSAGE], remedy=reason.remedy or remedy)
