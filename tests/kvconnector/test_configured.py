"""What [kv] of deeplink.toml says reaches the endpoint and its transports."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest
from loopback import HEADS, HND, LAYERS, SECRET, make_cache, make_contract, make_group
from sockets import soon

from deeplink.config import KVSection
from deeplink.errors import ConfigError
from deeplink.kvconnector import configured
from deeplink.kvconnector.caches.group import Group
from deeplink.kvconnector.contracts.contract import Contract
from deeplink.kvconnector.endpoint import Endpoint
from deeplink.plugins import Plugins, load_plugins

CASTS = ("bfloat16->float16", "*->float8_e4m3fn")


@pytest.fixture
def plugins() -> Plugins:
    names = {"tcp": "deeplink.kvconnector.transport.tcp", "nixl": "deeplink.kvconnector.transport.nixl"}
    return load_plugins([EntryPoint(name, module, "deeplink") for name, module in names.items()])


def started(section: KVSection, plugins: Plugins, states: list[Any] | None = None) -> Endpoint:
    spec = make_group(HND, 16)
    group = Group(spec, tuple(range(LAYERS)), (0, HEADS), make_cache(HND, 16, spec.dtype, seed=0))

    def state(channel: str, transports: dict[str, str], casts: tuple[str, ...]) -> Contract:
        if states is not None:
            states.append(casts)
        return make_contract("e", "both", spec, channel=channel, **transports)

    return configured.endpoint(section, None, plugins, SECRET, "e", (group,), state)


def test_casts_transports_and_staging(plugins: Plugins) -> None:
    states: list[Any] = []
    made = started(KVSection(casts=CASTS, staging=1 << 20, chunk=1 << 19, streams=3), plugins, states)
    try:
        assert states == [CASTS]
        assert list(made.contract.ranks[0].transports) == list(made.transports.running) == ["tcp"]
        tcp = made.transports.running["tcp"]
        link = tcp.connect(tcp.address, soon())
        assert len(link._streams) == 3  # type: ignore[attr-defined]
        link.close()
        assert made._outgoing.capacity == 1 << 20
    finally:
        made.close()


def test_a_cast_that_is_none_starts_nothing(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(configured, "start", lambda *arguments: calls.append(arguments))
    with pytest.raises(ConfigError) as caught:
        started(KVSection(casts=("bfloat16->nothing",)), plugins)
    assert caught.value.field == "casts"
    assert not calls


def test_what_the_section_does_not_trust_is_left_out_by_its_name(plugins: Plugins) -> None:
    found = configured.transports(KVSection(digest="off"), None, plugins, SECRET)
    try:
        assert list(found.running) == ["tcp"]
        assert isinstance(problem := found.failed["nixl"], ConfigError)
        assert (problem.field, problem.ours) == ("kv.trust", "peers")
    finally:
        found.close()
    found = configured.transports(KVSection(trust="fabric", digest="off"), None, plugins, SECRET)
    try:
        assert isinstance(problem := found.failed["nixl"], ConfigError)
        assert problem.field == "kv.digest"
    finally:
        found.close()


def test_without_any_transport(plugins: Plugins) -> None:
    with pytest.raises(ConfigError) as caught:
        started(KVSection(), load_plugins([]))
    assert caught.value.field == "transports"
