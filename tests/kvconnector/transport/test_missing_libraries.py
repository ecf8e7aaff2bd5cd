"""A library that is not there is a reason, not an error: the engine starts with what is."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from deeplink.errors import ConfigError
from deeplink.kvconnector.transport import dlslime, mooncake, nixl
from deeplink.kvconnector.transport.start import start
from deeplink.kvconnector.transport.tcp import TcpTransport

MODULES = {"mooncake": ["mooncake"], "dlslime": ["dlslime"], "nixl": list(nixl.MODULES)}


@pytest.mark.parametrize(
    ("transport", "extra"),
    [(nixl.NixlTransport, "nixl"), (mooncake.MooncakeTransport, "mooncake"), (dlslime.DlslimeTransport, "dlslime")],
)
def test_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, transport: Any, extra: str) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] in MODULES[extra]:
            monkeypatch.delitem(sys.modules, name)
    for name in MODULES[extra]:
        monkeypatch.setitem(sys.modules, name, None)
    started = start({"tcp": TcpTransport, extra: transport}, "127.0.0.1", b"secret", "fabric")
    started.close()
    assert list(started.running) == ["tcp"]
    reason = started.failed[extra]
    assert isinstance(reason, ConfigError)
    assert f"deeplink[{extra}]" in reason.remedy
    assert "cannot be loaded" in str(reason)
