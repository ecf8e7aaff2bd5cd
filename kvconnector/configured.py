"""What deeplink.toml says under [kv] and the plugins have, as what runs: how every engine's process begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from deeplink.kvconnector.caches.group import Group
from deeplink.kvconnector.contracts import contract as co
from deeplink.kvconnector.endpoint import Endpoint, Settings
from deeplink.kvconnector.layouts.cast import parse_consent
from deeplink.kvconnector.transport.start import Transports, start
from deeplink.kvconnector.wires.tls import Tls

if TYPE_CHECKING:
    from deeplink.config import KVSection
    from deeplink.plugins import Plugins


def transports(section: KVSection, tls: Tls | None, plugins: Plugins, secret: bytes) -> Transports:
    """Every transport that is registered, started or with the reason why not. The caller closes them."""
    verify = section.digest == "always"
    options = {"tcp": {"tls": tls, "streams": section.streams}}
    return start(plugins.transports.items, section.host, secret, section.trust, verify, options)


def endpoint(
    section: KVSection,
    tls: Tls | None,
    plugins: Plugins,
    secret: bytes,
    epoch: str,
    groups: Sequence[Group],
    state: Callable[[str, dict[str, str], tuple[str, ...]], co.Contract],
    rank: int = 0,
) -> Endpoint:
    """It listens; the caller closes it. `state` builds this rank's contract, of the address of its channel, those of
    its transports by name, and the casts that its operator consents to. Raises ConfigError for a cast that is none, and
    where no transport runs."""
    casts = tuple(str(parse_consent(text)) for text in section.casts)
    return Endpoint(
        groups,
        Settings.of(section, tls),
        secret,
        epoch,
        transports(section, tls, plugins, secret).require(),
        lambda channel, addresses: state(channel, addresses, casts),
        rank,
    )
