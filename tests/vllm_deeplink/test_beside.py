"""Deeplink's connector in a config of several."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm_deeplink import CONNECTOR, beside


def config(connector: str, **extra: Any) -> Any:
    return SimpleNamespace(kv_connector=connector, kv_connector_extra_config=extra)


def test_its_settings_are_found() -> None:
    assert beside.settings(None) is None
    assert beside.settings(config("NixlConnector", a=1)) is None
    assert beside.settings(config(CONNECTOR, a=1)) == {"a": 1}
    ours = {"kv_connector": CONNECTOR, "kv_connector_extra_config": {"a": 1}}
    other = {"kv_connector": "OffloadingConnector"}
    assert beside.settings(config(beside.SEVERAL, connectors=[other, ours])) == {"a": 1}
    assert beside.settings(config(beside.SEVERAL, connectors=[other])) is None
    assert beside.settings(config(beside.SEVERAL)) is None
    assert beside.settings(config(beside.SEVERAL, connectors=[{"kv_connector": CONNECTOR}])) == {}
