"""NIXL: writes through UCX, which chooses what carries them: RDMA, copies between the processes of a host, or TCP.

The agents' metadata goes over our own socket. There is no progress thread, because NIXL's spins: the pusher progresses
when it looks at a transfer, the owner's end while a push into its memory is under way. One agent serves all links, and
is used by one thread at a time.

NIXL has no timeout, and cannot call back what it has posted. Under UCX's path within one host (process_vm_writev) a
transfer is over when the posting call returns.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from deeplink.errors import ConfigError, HandoffError, PeerGone, ProtocolError
from deeplink.hookspecs import hookimpl
from deeplink.kvconnector.transport.base import Capabilities, Transport
from deeplink.kvconnector.transport.library import Flight, Session
from deeplink.kvconnector.transport.onesided import OneSided
from deeplink.kvconnector.transport.pieces import Addresses, Pieces

log = logging.getLogger(__name__)

NAME = "nixl"
BACKEND = "UCX"
MODULES = ("nixl", "nixl_cu13", "nixl_cu12", "nixl_rocm")
"""The first chooses among the others; each of them also works without it."""
MEMORY = "DRAM"
MOST_PIECES = 16384


class _Description(msgspec.Struct, frozen=True):
    name: str
    metadata: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Description)


def described(theirs: bytes) -> _Description:
    """What a peer says of its agent. Raises ProtocolError."""
    try:
        return _decoder.decode(theirs)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise ProtocolError(f"not a description of a NIXL agent: {exc}") from exc


def load() -> ModuleType:
    problems = []
    for name in MODULES:
        try:
            return importlib.import_module(f"{name}._api")
        except ImportError as exc:
            problems.append(f"{name}: {exc}")
    raise ConfigError(
        f"the NIXL library cannot be loaded ({'; '.join(problems)})",
        remedy="pip install 'deeplink[nixl]', or nixl-cu12 alone without its dependencies where there is no GPU",
    )


class NixlLibrary:
    """One agent. `name` is new at every start, so a peer never takes this process for one that was here before."""

    most_pieces = MOST_PIECES

    def __init__(self) -> None:
        api = load()
        bindings = importlib.import_module(f"{api.__name__.rpartition('.')[0]}._bindings")
        kinds = [kind for kind in vars(bindings).values() if isinstance(kind, type) and issubclass(kind, Exception)]
        self.errors: tuple[type[Exception], ...] = (RuntimeError, *kinds)
        self._disconnected: tuple[type[Exception], ...] = (bindings.nixlRemoteDisconnectError,)
        self.name = f"deeplink-{secrets.token_hex(8)}"
        try:
            config = api.nixl_agent_config(enable_prog_thread=False, backends=[BACKEND])
            self._agent: Any = api.nixl_agent(self.name, config)
            if BACKEND not in self._agent.backends:
                raise ConfigError(f"NIXL has no {BACKEND} here, only {', '.join(self._agent.plugin_list)}")
        except self.errors as exc:
            raise ConfigError(f"NIXL does not start: {exc}") from exc
        self._lock = threading.Lock()
        self._peers: Counter[str] = Counter()

    @contextlib.contextmanager
    def using(self) -> Iterator[Any]:
        """The agent, for one thread. What NIXL raises is an error of ours afterwards."""
        with self._lock:
            if self._agent is None:
                raise PeerGone("the transport is closed")
            try:
                yield self._agent
            except self._disconnected as exc:
                raise PeerGone(f"NIXL lost the peer: {exc}") from exc
            except self.errors as exc:
                raise HandoffError(f"NIXL: {exc}") from exc

    def register(self, start: int, length: int) -> object:
        with self.using() as agent:
            return agent.register_memory([(start, length, 0, "")], MEMORY)

    def unregister(self, registration: object) -> None:
        try:
            with self.using() as agent:
                agent.deregister_memory(registration)
        except PeerGone:
            pass
        except HandoffError as exc:
            log.warning("NIXL does not unregister memory: %s", exc)

    def session(self, *, serving: bool) -> Session:
        return NixlSession(self, serving)

    def describe(self) -> bytes:
        with self.using() as agent:
            return _encoder.encode(_Description(self.name, agent.get_agent_metadata()))

    def meet(self, description: bytes) -> str:
        """The peer's name, to be parted with once for every time."""
        theirs = described(description)
        with self.using() as agent:
            # An agent knows itself, and does not want to be introduced.
            if theirs.name != self.name:
                agent.add_remote_agent(theirs.metadata)
            self._peers[theirs.name] += 1
        return theirs.name

    def part(self, peer: str) -> None:
        with contextlib.suppress(HandoffError), self.using() as agent:
            self._peers[peer] -= 1
            if not self._peers[peer]:
                del self._peers[peer]
                if peer != self.name:
                    agent.remove_remote_agent(peer)

    def close(self) -> None:
        # Left to the interpreter's exit, the agent is torn down after what it needs, and crashes.
        with self._lock:
            self._agent = None


class NixlSession:
    """The owner's end need not know who writes."""

    def __init__(self, library: NixlLibrary, serving: bool) -> None:
        self._library = library
        self._serving = serving
        self._peer = ""

    def describe(self) -> bytes:
        return self._library.describe() if self._serving else b""

    def meet(self, theirs: bytes) -> None:
        if not self._serving:
            before, self._peer = self._peer, self._library.meet(theirs)
            if before:
                self._library.part(before)

    def write(self, pieces: Pieces) -> Flight:
        with self._library.using() as agent:
            ours = agent.get_xfer_descs(_rows(pieces.source, pieces.length), MEMORY)
            theirs = agent.get_xfer_descs(_rows(pieces.target, pieces.length), MEMORY)
            handle = agent.initialize_xfer("WRITE", ours, theirs, self._peer)
            try:
                return NixlFlight(self._library, handle, agent.transfer(handle))
            except self._library.errors:
                agent.release_xfer_handle(handle)
                raise

    def progress(self) -> None:
        with self._library.using() as agent:
            agent.get_new_notifs()

    def close(self) -> None:
        if self._peer:
            self._library.part(self._peer)
            self._peer = ""


class NixlFlight:
    """Its handle is released under the lock; left to the garbage collector, that would be at any time."""

    def __init__(self, library: NixlLibrary, handle: Any, state: str) -> None:
        self._library = library
        self._handle = handle
        self._state = state

    def done(self) -> bool:
        with self._library.using() as agent:
            over = True
            try:
                if self._state == "PROC":
                    self._state = agent.check_xfer_state(self._handle)
                over = self._state != "PROC"
            finally:
                if over:
                    agent.release_xfer_handle(self._handle)
        if over and self._state != "DONE":
            raise HandoffError(f"NIXL could not write: {self._state}")
        return over


def _rows(start: Addresses, length: Addresses) -> npt.NDArray[np.uint64]:
    """What NIXL takes for a list: address, length, device."""
    rows = np.zeros((len(start), 3), np.uint64)
    rows[:, 0], rows[:, 1] = start, length
    return rows


class NixlTransport(OneSided):
    name = NAME
    capabilities = Capabilities(
        memory=frozenset({"dram"}), cross_host=True, authenticated=False, revocable=False, preference=3
    )

    def __init__(self, host: str, secret: bytes) -> None:
        super().__init__(host, secret, NixlLibrary())


@hookimpl
def deeplink_register_transports(register: Callable[[str, Callable[..., Transport]], None]) -> None:
    register(NAME, NixlTransport)
