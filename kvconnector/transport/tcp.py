"""The embedded transport: pushes over plain sockets, or over TLS.

A push goes in batches (`batch` has their form), over one stream or several. The serving side looks the keys up, checks
the bounds, and receives straight into the regions. Bytes that changed on their way are found by a checksum, and such a
push is never acknowledged. Withdrawing a region that is being written breaks that connection and waits for its thread
to let go, so freed staging is never written late.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import xxhash

from deeplink.errors import DeeplinkError, PeerGone, ProtocolError, Refused
from deeplink.hookspecs import hookimpl
from deeplink.kvconnector.relayout import compiled
from deeplink.kvconnector.transport import answer
from deeplink.kvconnector.transport import batch as batches
from deeplink.kvconnector.transport.base import Capabilities, Push, Region, Transport
from deeplink.kvconnector.transport.batch import HEAD, MAX_PARTS, PART, SUM
from deeplink.kvconnector.transport.regions import Regions
from deeplink.kvconnector.wires import greeting, wire
from deeplink.kvconnector.wires.listener import Listener
from deeplink.kvconnector.wires.tls import Tls

if TYPE_CHECKING:
    from deeplink.kvconnector.transport.windows import Windows

NAME = "tcp"
PURPOSE = "transport-tcp"
IDLE_SECONDS = 24 * 3600.0

BATCH = 4 << 20
"""Bytes: large beside the cost of a batch, and each must come within `answer.BODY_SECONDS`."""
STRIPE = 1 << 20
"""The same where there are several streams, which take the next batch when they have sent one. A push has no more of
them at work than it has stripes."""
LOCAL_BUFFER = 256 << 10
"""What the kernel holds of a push to the same host (twice this, as it counts): it stays in a core's cache then. 1 GB
costs 0.27 s of CPU for both processes, 0.38 with a buffer of 4 MiB, to which the kernel would let it grow."""
LOCAL_BATCH = 32 << 20
"""Bytes of a batch to the same host, which is never slow."""
STREAMS = 4
"""To another host, unless the kernel paces by BBR. On 500 Mbit/s with a round trip of 20 ms and 0.5 % of packets lost,
one stream of CUBIC went at 44 to 76 Mbit/s, two at 79 to 112, four at 143 to 262, eight at 206 to 264; without loss
one at 427, four at 446, eight at 388. BBR fills both links with one, and several in step only add threads. So does
loopback: CPU time bounds it."""


class TcpLink:
    def __init__(self, streams: Sequence[socket.socket], batch: int = BATCH) -> None:
        self._streams = [_Stream(sock) for sock in streams]
        self._batch = batch

    def push(self, pushes: Sequence[Push], deadline: float) -> None:
        self.post(pushes, deadline)(deadline)

    def post(self, pushes: Sequence[Push], deadline: float) -> Callable[[float], None]:
        """As `push`, but returns when the bytes are on their way; the result, called with a deadline, does the rest.

        What was posted first has to be waited for first. A link that is always a post ahead is never idle for the
        time that an answer takes: 20 ms of 150 for 8 MiB over 500 Mbit/s with a round trip of 20 ms.
        """
        stripes = sum(push.source.nbytes for push in pushes) // STRIPE
        streams = self._streams[: max(1, stripes)]
        if len(streams) == 1:
            streams[0].send(batches.cut(pushes, self._batch), deadline)
        else:
            self._stripe(streams, _Turns(batches.cut(pushes, STRIPE)), deadline)

        def wait(deadline: float) -> None:
            for stream in streams:
                stream.expect(deadline)

        return wait

    def close(self) -> None:
        for stream in self._streams:
            stream.close()

    def _stripe(self, streams: Sequence[_Stream], work: _Turns, deadline: float) -> None:
        problems: list[DeeplinkError] = []

        def run(stream: _Stream) -> None:
            try:
                stream.send(work, deadline)
            except DeeplinkError as exc:
                problems.append(exc)
                self.close()  # the others need not go on

        threads = [threading.Thread(target=run, args=(stream,), daemon=True) for stream in streams[1:]]
        for thread in threads:
            thread.start()
        run(streams[0])
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0]


class _Turns:
    """An iterator that several threads draw from."""

    def __init__(self, items: Iterator[list[Push]]) -> None:
        self._items = items
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[list[Push]]:
        return self

    def __next__(self) -> list[Push]:
        with self._lock:
            return next(self._items)


class _Stream:
    """One connection of a link, and how many answers its peer owes."""

    def __init__(self, sock: socket.socket) -> None:
        self._shared = wire.Shared(sock)
        self._bytes = _Bytes(sock)
        self._owed = 0

    def send(self, work: Iterator[list[Push]], deadline: float) -> None:
        """The batches, and the request for one answer to all of them."""
        with self._shared.use() as sock:
            head = b""  # goes with the bytes that follow it
            for batch in work:
                found = self._bytes.send(head + batches.pack(batch), [push.source for push in batch], deadline)
                head = SUM.pack(found)
                if not self._owed and wire.readable(sock, 0):
                    answer.expect(sock, deadline)  # a refusal, as nothing was asked yet
                    raise ProtocolError("the peer's transport answered what it was not asked")
            wire.send(sock, head + batches.pack([]), deadline)
        self._owed += 1

    def expect(self, deadline: float) -> None:
        with self._shared.use() as sock:
            answer.expect(sock, deadline)
        self._owed -= 1

    def close(self) -> None:
        self._shared.close()


class TcpTransport:
    """`streams` per link; 0 takes as many as help. With `tls` peers must use TLS too."""

    name = NAME
    capabilities = Capabilities(memory=frozenset({"dram"}), cross_host=True, authenticated=True)

    def __init__(self, host: str, secret: bytes, *, tls: Tls | None = None, streams: int = 0) -> None:
        self._secret = secret
        self._tls = tls
        self._wanted = streams
        self._regions = Regions()
        self._listener = Listener(host, secret, PURPOSE, self._serve, tls)

    @property
    def address(self) -> str:
        return self._listener.address

    def stage(self, memory: memoryview) -> None:
        """Nothing to prepare: this process's own threads move the bytes."""

    def register(self, memory: memoryview) -> Region:
        return self._regions.register(memory)

    def connect(self, address: str, deadline: float) -> TcpLink:
        with contextlib.ExitStack() as undo:
            streams = [undo.enter_context(self._dial(address, deadline))]
            batch = LOCAL_BATCH if _same_host(streams[0]) else BATCH
            for _ in range(1, self._wanted or _default(streams[0])):
                streams.append(undo.enter_context(self._dial(address, deadline)))
            undo.pop_all()
        return TcpLink(streams, batch)

    def close(self) -> None:
        self._listener.close()

    def _dial(self, address: str, deadline: float) -> socket.socket:
        sock = wire.connect(address, deadline)
        try:
            if _same_host(sock):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_BUFFER)
            return greeting.greet(sock, self._secret, PURPOSE, server=False, deadline=deadline, tls=self._tls)
        except OSError as exc:
            sock.close()
            raise PeerGone(f"the connection to {address} broke: {exc}") from exc
        except DeeplinkError:
            sock.close()
            raise

    def _serve(self, sock: socket.socket) -> None:
        def interrupt() -> None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

        content = _Bytes(sock)
        while True:
            count, checksum = HEAD.unpack(wire.receive(sock, HEAD.size, time.monotonic() + IDLE_SECONDS))
            if count > MAX_PARTS:
                raise answer.refuse(sock, f"{count} parts at once, at most {MAX_PARTS} may be")
            deadline = time.monotonic() + answer.BODY_SECONDS
            parts = wire.receive(sock, count * PART.size, deadline)
            if (found := batches.head_sum(count, parts)) != checksum:
                raise answer.corrupted(sock, checksum, found)
            if count == 0:
                answer.accept(sock)
                continue
            try:
                with self._regions.writing(batches.unpack(parts), interrupt) as views:
                    found, checksum = content.take(views, deadline)
            except Refused as exc:
                raise answer.refuse(sock, exc.message) from exc
            if found != checksum:
                raise answer.corrupted(sock, checksum, found)


class _Bytes:
    """What goes over one socket with checksums: by compiled loops where that is possible."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._windows: Windows | None = None
        if compiled.wanted():
            from deeplink.kvconnector.transport import windows  # takes a moment, and needs numba

            self._windows = windows.of(sock)

    def send(self, head: bytes, views: Sequence[memoryview], deadline: float) -> int:
        """Send the head and the views, and return the checksum of the views."""
        if self._windows is not None and self._windows.able(views):
            return self._windows.send(head, views, deadline)
        checksum = xxhash.xxh3_64()
        first = [head]
        for window in batches.windows(views):
            for view in window:
                checksum.update(view)
            wire.send_all(self._sock, [*first, *window], deadline)
            first = []
        wire.send_all(self._sock, first, deadline)
        return checksum.intdigest()

    def take(self, views: Sequence[memoryview], deadline: float) -> tuple[int, int]:
        """Fill the views, and return the checksum of what came, and the one that came with it."""
        tail = memoryview(bytearray(SUM.size))
        if self._windows is not None and self._windows.able(views):
            found = self._windows.take(views, tail, deadline)
        else:
            checksum = xxhash.xxh3_64()
            for window in batches.windows(views):
                wire.receive_into_all(self._sock, window, deadline)
                for view in window:
                    checksum.update(view)
            wire.receive_into(self._sock, tail, deadline)
            found = checksum.intdigest()
        return found, SUM.unpack(tail)[0]


def _same_host(sock: socket.socket) -> bool:
    try:
        return bool(sock.getsockname()[0] == sock.getpeername()[0])
    except OSError as exc:  # it has gone again
        raise wire.broken(exc, "the connection broke at once") from exc


def _default(sock: socket.socket) -> int:
    if _same_host(sock):
        return 1
    with contextlib.suppress(AttributeError, OSError):  # a system that does not tell
        if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(b"bbr"):
            return 1
    return STREAMS


@hookimpl
def deeplink_register_transports(register: Callable[[str, Callable[..., Transport]], None]) -> None:
    register(NAME, TcpTransport)
