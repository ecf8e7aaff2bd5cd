"""The steps of a handoff are timed only while that is asked for."""

from __future__ import annotations

from deeplink.bench.stages import STEPS, Stages


def test_the_methods_are_put_back() -> None:
    before = [getattr(owner, name) for owner, name in STEPS.values()]
    stages = Stages()
    stages.begin()
    assert not set(before) & {getattr(owner, name) for owner, name in STEPS.values()}
    assert stages.end() == {}
    assert [getattr(owner, name) for owner, name in STEPS.values()] == before
