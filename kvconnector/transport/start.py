"""Starting every transport that works here and that the operator trusts, and keeping why the others do not run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deeplink.errors import ConfigError
from deeplink.kvconnector.transport.base import Capabilities, Transport

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Transports:
    """`running` by name, the preferred first; `failed` by name with what starting it raised."""

    running: Mapping[str, Transport]
    failed: Mapping[str, Exception] = field(default_factory=dict)

    @property
    def addresses(self) -> dict[str, str]:
        return {name: transport.address for name, transport in self.running.items()}

    def stage(self, arenas: Iterable[memoryview]) -> Transports:
        """As `offer`, and raises ConfigError when none is left."""
        return self.offer(arenas).require()

    def offer(self, arenas: Iterable[memoryview]) -> Transports:
        """Those that take the staging arenas, and why the others do not, which are closed."""
        arenas = list(arenas)
        running = dict(self.running)
        failed = dict(self.failed)
        for name, transport in self.running.items():
            try:
                for arena in arenas:
                    transport.stage(arena)
            except Exception as exc:  # noqa: BLE001 - a library that cannot register it must not take the engine down
                failed[name] = exc
                log.warning("deeplink transport %s cannot use the staging memory: %s", name, exc or repr(exc))
                running.pop(name).close()
        return Transports(running, failed)

    def require(self) -> Transports:
        """Itself; raises ConfigError when none runs."""
        if self.running:
            return self
        reasons = "; ".join(f"{name}: {exc or repr(exc)}" for name, exc in self.failed.items())
        raise ConfigError(
            f"no transport works here ({reasons or 'no plugin has one'})",
            field="transports",
            remedy="see the log for plugins that did not load, and DEEPLINK_DISABLE_PLUGINS",
        )

    def close(self) -> None:
        for transport in self.running.values():
            transport.close()


def start(
    factories: Mapping[str, Callable[..., Transport]],
    host: str,
    secret: bytes,
    trust: str = "peers",
    verify: bool = True,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> Transports:
    """Start each of them, with the keyword arguments that `options` has under its name; the caller closes the result,
    in which maybe none runs.

    With `trust` in ``peers``, only those that authenticate; without `verify`, which is checking the digests of all
    tiles, only those that can revoke what a peer may write. A factory with an attribute `capabilities`, as a class has,
    is not even called otherwise.
    """
    running: dict[str, Transport] = {}
    failed: dict[str, Exception] = {}
    for name, factory in sorted(factories.items()):
        capabilities = getattr(factory, "capabilities", None)
        if isinstance(capabilities, Capabilities) and (reason := _unfit(capabilities, trust, verify)) is not None:
            failed[name] = reason
            continue
        try:
            transport = factory(host, secret, **(options or {}).get(name, {}))
        except Exception as exc:  # noqa: BLE001 - a library that does not work here must not take the engine down
            failed[name] = exc
            log.warning("deeplink transport %s does not start here: %s", name, exc or repr(exc))
            continue
        if (reason := _unfit(transport.capabilities, trust, verify)) is None:
            running[name] = transport
        else:
            transport.close()
            failed[name] = reason
    return Transports(dict(sorted(running.items(), key=_preference)), failed)


def _unfit(capabilities: Capabilities, trust: str, verify: bool) -> ConfigError | None:
    """Why this configuration does not use such a transport; None when it does."""
    if not (capabilities.authenticated or trust == "fabric"):
        return ConfigError(
            "this transport cannot authenticate what is written into staging",
            field="kv.trust",
            ours=trust,
            theirs="fabric",
            remedy='where nobody else is on the network, set trust = "fabric" under [kv] in deeplink.toml',
        )
    if not (capabilities.revocable or verify):
        return ConfigError(
            "this transport cannot keep a peer's late write out of staging, so all that arrives must be verified",
            field="kv.digest",
            ours="sampled or off",
            theirs="always",
            remedy='set digest = "always" under [kv] in deeplink.toml',
        )
    return None


def _preference(item: tuple[str, Transport]) -> tuple[bool, int, str]:
    """Those within one host before all others, then by what they say of themselves, then by name."""
    name, transport = item
    return transport.capabilities.cross_host, -transport.capabilities.preference, name
