"""Starting every transport that works here, and keeping why the others do not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deeplink.errors import ConfigError
from deeplink.kvconnector.transport.base import Transport

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Transports:
    """`running` by name, the preferred first; `failed` by name with what starting it raised."""

    running: Mapping[str, Transport]
    failed: Mapping[str, Exception] = field(default_factory=dict)

    @property
    def addresses(self) -> dict[str, str]:
        return {name: transport.address for name, transport in self.running.items()}

    def close(self) -> None:
        for transport in self.running.values():
            transport.close()


def start(
    factories: Mapping[str, Callable[..., Transport]],
    host: str,
    secret: bytes,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> Transports:
    """Start each of them, with the keyword arguments that `options` has under its name.

    Raises ConfigError when none is left; the caller closes the result.
    """
    running: dict[str, Transport] = {}
    failed: dict[str, Exception] = {}
    for name, factory in sorted(factories.items()):
        try:
            running[name] = factory(host, secret, **(options or {}).get(name, {}))
        except Exception as exc:  # noqa: BLE001 - a library that does not work here must not take the engine down
            failed[name] = exc
            log.warning("deeplink transport %s does not start here: %s", name, exc or repr(exc))
    if not running:
        reasons = "; ".join(f"{name}: {exc or repr(exc)}" for name, exc in failed.items())
        raise ConfigError(
            f"no transport works here ({reasons or 'no plugin has one'})",
            field="transports",
            remedy="see the log for plugins that did not load, and DEEPLINK_DISABLE_PLUGINS",
        )
    return Transports(dict(sorted(running.items(), key=_preference)), failed)


def _preference(item: tuple[str, Transport]) -> tuple[bool, int, str]:
    """Those within one host before all others, then by what they say of themselves, then by name."""
    name, transport = item
    return transport.capabilities.cross_host, -transport.capabilities.preference, name
