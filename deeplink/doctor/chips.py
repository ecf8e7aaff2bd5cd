"""Which chips this host has, as far as its device nodes, its buses and the vendors' own tools tell."""

from __future__ import annotations

from deeplink.chips import detect, report
from deeplink.doctor.model import Finding, Section
from deeplink.doctor.subject import Subject
from deeplink.errors import DeeplinkError

TOOL_SECONDS = 2.0
"""For the vendors' tools together; a doctor may wait longer than an engine that starts."""


def examine(subject: Subject) -> Section:
    if isinstance(subject.plugins, DeeplinkError):
        return Section("chips", (Finding("profiles", "failed", reason=subject.plugins.reason()),))
    profiles = subject.plugins.chips.items.values()
    found = detect.detect(profiles, seconds=TOOL_SECONDS)
    lines = report.lines(found, profiles)
    return Section("chips", tuple(Finding(one.name, one.standing, one.text, one.reason, one.facts) for one in lines))
