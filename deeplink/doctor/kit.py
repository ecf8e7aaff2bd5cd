"""The transports of this host, started as an engine starts them, with the memory for trying them out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from deeplink.config import Config
from deeplink.doctor.exchange import Kit
from deeplink.doctor.model import reason_of
from deeplink.doctor.subject import Effort
from deeplink.doctor.trial import Memory
from deeplink.errors import Reason
from deeplink.kvconnector import configured
from deeplink.kvconnector.wires.tls import Tls
from deeplink.plugins import Plugins

_ADDRESS = "host under [kv] in deeplink.toml must be an address of this host"
"""What to do about most of what the system says when a transport cannot listen."""


def load_tls(config: Config) -> Tls | None:
    """Raises ConfigError."""
    return Tls.of(config.kv.tls)


@contextlib.contextmanager
def started(config: Config, plugins: Plugins, secret: bytes, effort: Effort) -> Iterator[Kit]:
    """Raises ConfigError for TLS; transports that do not run are in the kit with their reasons."""
    transports = configured.transports(config.kv, load_tls(config), plugins, secret)
    try:
        memory = Memory(effort.size)
        transports = transports.offer([memory.arena])
        off = {name: explain(problem) for name, problem in transports.failed.items()}
        yield Kit(transports, off, memory, min(config.kv.chunk, effort.size), effort.seconds)
    finally:
        transports.close()


def explain(problem: Exception) -> Reason:
    return reason_of(problem, _ADDRESS if isinstance(problem, OSError) else "")
