"""Which versions of SGLang are hooked into, and what the platform does."""

from __future__ import annotations

import logging

import pytest

from sglang_deeplink import hooks, platform, platform_plugin


@pytest.mark.parametrize(
    ("found", "forced", "accepted"),
    [
        (hooks.TESTED[0], "", True),
        ("0.5.24", "", False),
        ("0.5.24", "1", True),
        ("0.5.24", "yes", False),
    ],
)
def test_untested_versions_are_refused_unless_forced(
    found: str, forced: str, accepted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert hooks._accepts(found, forced) is accepted
    assert (found in caplog.text) is (found not in hooks.TESTED)


def test_the_platform_steps_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(platform.VARIABLE, raising=False)
    assert platform_plugin() is None
    monkeypatch.setenv(platform.VARIABLE, "another")
    assert platform_plugin() is None
