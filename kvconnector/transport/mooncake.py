"""Mooncake's transfer engine: RDMA where the library finds NICs, else TCP with threads of its own.

Peers are found by its handshake over TCP, without a name service. Its batch calls wait inside, spinning, until up to
half a minute after a peer has frozen; so each piece is posted alone and looked at from here, which over loopback is
also faster (1.06 against 0.76 GB/s for 4096 x 32 KiB). A queue holds 1024 pieces per peer; more fail at once.

The first write to a peer asks it where its memory is, and holds up the writes to all others until it has answered or a
minute is over; so a thread posts, and whoever waits for it keeps its deadline.

Over TCP its serving side checks that what is written lies in registered memory, but not who writes it.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
from collections.abc import Callable
from typing import Any

from deeplink.errors import ConfigError, HandoffError, PeerGone
from deeplink.hookspecs import hookimpl
from deeplink.kvconnector.transport.base import Capabilities, Transport
from deeplink.kvconnector.transport.library import Flight, Session
from deeplink.kvconnector.transport.onesided import OneSided
from deeplink.kvconnector.transport.pieces import Pieces

log = logging.getLogger(__name__)

NAME = "mooncake"
HANDSHAKE = "P2PHANDSHAKE"
PROTOCOL = "tcp"
"""What the engine falls back to. RDMA needs no naming: the engine finds NICs by itself."""
MOST_PIECES = 1000


def load() -> Any:
    try:
        return importlib.import_module("mooncake.engine")
    except ImportError as exc:
        raise ConfigError(
            f"the Mooncake library cannot be loaded: {exc}",
            remedy="pip install 'deeplink[mooncake]', and the system's libibverbs1, which it needs even for TCP",
        ) from exc


class MooncakeLibrary:
    """One engine. It locks by itself; ours only guards its end."""

    most_pieces = MOST_PIECES

    def __init__(self, host: str) -> None:
        self._engine: Any = load().TransferEngine()
        code = self._engine.initialize(host, HANDSHAKE, PROTOCOL, "")
        if code:
            raise ConfigError(f"Mooncake's engine does not start on {host}: code {code}")
        self.address = f"{host}:{self._engine.get_rpc_port()}"
        self._lock = threading.Lock()

    @property
    def engine(self) -> Any:
        engine = self._engine
        if engine is None:
            raise PeerGone("the transport is closed")
        return engine

    def register(self, start: int, length: int) -> object:
        if code := self.engine.register_memory(start, length):
            raise HandoffError(f"Mooncake does not register {length} bytes at {start:#x}: code {code}")
        return start

    def unregister(self, registration: object) -> None:
        with contextlib.suppress(PeerGone):
            if code := self.engine.unregister_memory(registration):
                log.warning("Mooncake does not unregister memory: code %d", code)

    def session(self, *, serving: bool) -> Session:
        return MooncakeSession(self)

    def close(self) -> None:
        with self._lock:
            self._engine = None


class MooncakeSession:
    def __init__(self, library: MooncakeLibrary) -> None:
        self._library = library
        self._peer = ""

    def describe(self) -> bytes:
        return self._library.address.encode()

    def meet(self, theirs: bytes) -> None:
        self._peer = theirs.decode(errors="replace")

    def write(self, pieces: Pieces) -> Flight:
        return MooncakeFlight(self._library, self._peer, pieces)

    def progress(self) -> None:
        """The engine has its own threads."""

    def close(self) -> None:
        """The engine keeps its connections for the next session."""


class MooncakeFlight:
    """Posted by a thread of its own: the first piece to a peer waits for that to answer, and others wait for it."""

    def __init__(self, library: MooncakeLibrary, peer: str, pieces: Pieces) -> None:
        self._library = library
        self._posted: list[int] = []
        """The number of each piece on its way; 0 is one that was not even posted."""
        self._failed = 0
        arguments = library.engine, peer, pieces
        self._posting = threading.Thread(target=self._post, args=arguments, name="deeplink-mooncake", daemon=True)
        self._posting.start()

    def _post(self, engine: Any, peer: str, pieces: Pieces) -> None:
        every = zip(pieces.source.tolist(), pieces.target.tolist(), pieces.length.tolist(), strict=True)
        for source, target, length in every:
            batch = engine.transfer_submit_write(peer, source, target, length)
            self._posted.append(batch)
            if not batch:
                return

    def done(self) -> bool:
        """Also when some have failed, only after nothing is on its way any more."""
        if self._posting.is_alive():
            return False
        engine = self._library.engine
        while self._posted:
            state = engine.transfer_check_status(self._posted[-1]) if self._posted[-1] else -1
            if state == 0:
                return False
            self._posted.pop()
            self._failed += state != 1
        if self._failed:
            raise PeerGone(f"Mooncake could not write {self._failed} pieces")
        return True


class MooncakeTransport(OneSided):
    """Within one host `host` may be any of its addresses; across hosts, the one on the fabric."""

    name = NAME
    capabilities = Capabilities(
        memory=frozenset({"dram"}), cross_host=True, authenticated=False, revocable=False, preference=1
    )

    def __init__(self, host: str, secret: bytes) -> None:
        super().__init__(host, secret, MooncakeLibrary(host))


@hookimpl
def deeplink_register_transports(register: Callable[[str, Callable[..., Transport]], None]) -> None:
    register(NAME, MooncakeTransport)
