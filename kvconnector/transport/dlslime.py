"""DLSlime's RDMA endpoints, where there are NICs.

One device and one memory pool serve all links; each link has an endpoint of its own at both ends, whose description
goes over our socket. Memory is named, and bytes in it are addressed by offset. Of more than 4096 pieces in one call the
library makes several parts, and reports the end of the last alone. Its future can only be waited for, in a thread.

Its TCP endpoint is not used: that reads and writes any address of the process for anyone who connects, and reports a
write as done before it has arrived.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import threading
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from deeplink.errors import ConfigError, HandoffError, PeerGone, ProtocolError
from deeplink.hookspecs import hookimpl
from deeplink.kvconnector.transport.base import Capabilities, Transport
from deeplink.kvconnector.transport.library import Flight, Session
from deeplink.kvconnector.transport.onesided import OneSided
from deeplink.kvconnector.transport.pieces import Addresses, Pieces, Range

NAME = "dlslime"
MOST_PIECES = 4096


def load() -> Any:
    try:
        return importlib.import_module("dlslime")
    except ImportError as exc:
        raise ConfigError(
            f"the DLSlime library cannot be loaded: {exc}",
            remedy="pip install 'deeplink[dlslime]', and the system's libibverbs1",
        ) from exc


class Endpoints:
    """Where a library's endpoints come from: one RDMA device, the first that it finds."""

    most_pieces = MOST_PIECES

    def __init__(self) -> None:
        module = load()
        devices = module.available_nic()
        if not devices:
            raise ConfigError(
                "DLSlime finds no RDMA device here",
                remedy="see `rdma link`; SLIME_VISIBLE_DEVICES names those it may use",
            )
        self._module = module
        context = module.RDMAContext()
        if context.init(devices[0]):
            raise ConfigError(f"DLSlime cannot use the RDMA device {devices[0]}")
        self._pool: Any = module.RDMAMemoryPool(context)

    def make(self) -> Any:
        return self._module.RDMAEndpoint(pool=self._pool, num_qp=1)

    def forget(self, name: str) -> None:
        self._pool.unregister_memory_region(name)


class DlslimeLibrary:
    """Memory by name. An endpoint is told of a range when it first needs to; the pool registers each but once."""

    def __init__(self, endpoints: Endpoints) -> None:
        self.endpoints = endpoints
        self.most_pieces = endpoints.most_pieces
        self._lock = threading.Lock()
        self._ranges: dict[str, Range] = {}

    def register(self, start: int, length: int) -> object:
        name = f"{start:x}.{length:x}"
        with self._lock:
            self._ranges[name] = start, length
        return name

    def unregister(self, registration: object) -> None:
        name = str(registration)
        with self._lock:
            del self._ranges[name]
        self.endpoints.forget(name)

    def ranges(self) -> dict[str, Range]:
        with self._lock:
            return dict(self._ranges)

    def session(self, *, serving: bool) -> Session:
        return DlslimeSession(self)

    def close(self) -> None:
        """The device goes with the last endpoint."""


class Handles:
    """The library's numbers for memory, found by address."""

    def __init__(self, ranges: dict[int, tuple[int, int]]) -> None:
        """`ranges` has, by handle, address and length."""
        items = sorted((start, length, handle) for handle, (start, length) in ranges.items())
        self._starts = np.array([start for start, _, _ in items], np.uint64)
        self._stops = np.array([start + length for start, length, _ in items], np.uint64)
        self._handles = np.array([handle for _, _, handle in items], np.int64)

    def find(self, start: Addresses, length: Addresses) -> tuple[npt.NDArray[np.int64], Addresses]:
        """Of each piece, handle and offset. Raises HandoffError for one that lies in no range."""
        index = np.searchsorted(self._starts, start, side="right").astype(np.int64) - 1
        if (index < 0).any() or (start + length > self._stops[index]).any():
            raise HandoffError("a piece lies outside of the memory that DLSlime knows")
        return self._handles[index], start - self._starts[index]


class _Memory(msgspec.Struct):
    """Bounded so that an end, too, fits into 64 bits."""

    addr: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    length: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class _Endpoint(msgspec.Struct):
    mr_info: dict[str, _Memory]


def described(theirs: bytes) -> tuple[dict[str, Any], dict[str, Range]]:
    """What a peer says of its endpoint, for the library, and its memory by name. Raises ProtocolError."""
    try:
        info: dict[str, Any] = json.loads(theirs)
        known = msgspec.convert(info, _Endpoint, strict=False).mr_info
    except (ValueError, RecursionError, msgspec.ValidationError) as exc:
        raise ProtocolError(f"not a description of a DLSlime endpoint: {exc}") from exc
    return info, {name: (memory.addr, memory.length) for name, memory in known.items()}


class DlslimeSession:
    def __init__(self, library: DlslimeLibrary) -> None:
        self._library = library
        try:
            self._endpoint = library.endpoints.make()
        except RuntimeError as exc:
            raise HandoffError(f"DLSlime makes no endpoint: {exc}") from exc
        self._connected = False
        self._known: dict[str, tuple[int, Range]] = {}
        self._theirs = Handles({})

    def describe(self) -> bytes:
        self._learn()
        return json.dumps(self._endpoint.endpoint_info()).encode()

    def meet(self, theirs: bytes) -> None:
        info, regions = described(theirs)
        try:
            if not self._connected:
                self._endpoint.connect(info)
                self._connected = True
            self._theirs = Handles(
                {
                    self._endpoint.register_remote_memory_region(name, info["mr_info"][name]): region
                    for name, region in regions.items()
                }
            )
        except RuntimeError as exc:
            raise PeerGone(f"DLSlime does not connect: {exc}") from exc

    def write(self, pieces: Pieces) -> Flight:
        ours, from_ = Handles(self._learn()).find(pieces.source, pieces.length)
        theirs, to = self._theirs.find(pieces.target, pieces.length)
        every = zip(ours.tolist(), theirs.tolist(), to.tolist(), from_.tolist(), pieces.length.tolist(), strict=True)
        try:
            return DlslimeFlight(self._endpoint.write(list(every), None))
        except RuntimeError as exc:
            raise PeerGone(f"DLSlime does not write: {exc}") from exc

    def progress(self) -> None:
        """The library has its own threads."""

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._endpoint.shutdown()

    def _learn(self) -> dict[int, Range]:
        """Tell the endpoint of memory that is new; all of it by the endpoint's handles."""
        ranges = self._library.ranges()
        self._known = {name: known for name, known in self._known.items() if name in ranges}
        for name, (start, length) in ranges.items():
            if name not in self._known:
                handle = self._endpoint.register_memory_region(name, start, 0, length)
                if handle < 0:
                    raise HandoffError(f"DLSlime does not register {length} bytes: {handle}")
                self._known[name] = handle, (start, length)
        return dict(self._known.values())


class DlslimeFlight:
    def __init__(self, future: Any) -> None:
        self._future = future
        self._problem = ""
        self._thread = threading.Thread(target=self._wait, name="deeplink-dlslime", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        if self._thread.is_alive():
            return False
        if self._problem:
            raise PeerGone(f"DLSlime could not write: {self._problem}")
        return True

    def _wait(self) -> None:
        try:
            if code := self._future.wait():
                self._problem = f"code {code}"
        except RuntimeError as exc:
            self._problem = str(exc)


class DlslimeTransport(OneSided):
    """`host` is for our own socket; which NIC carries the bytes is the library's choice."""

    name = NAME
    capabilities = Capabilities(
        memory=frozenset({"dram"}), cross_host=True, authenticated=False, revocable=False, preference=2
    )

    def __init__(self, host: str, secret: bytes) -> None:
        super().__init__(host, secret, DlslimeLibrary(Endpoints()))


@hookimpl
def deeplink_register_transports(register: Callable[[str, Callable[..., Transport]], None]) -> None:
    register(NAME, DlslimeTransport)
