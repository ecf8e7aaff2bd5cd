"""Pushes to a process on the same host: staging is lent where it is, and anything else goes through a ring per link.

When a link is made, the serving side gives the pusher a ring (a sealed memfd), and the pusher gives the serving side
its staging memory to read. A push of what lies there says only where: ``key, offset, length``, and the place and lease
in the staging (`arena`). If that is all of a region, the region's owner reads it in place; if it is a part, the serving
side's thread copies it there. What lies elsewhere the pusher copies into a slot of the ring, says over the socket what
is in it, and the serving side's thread copies it on, which frees the slot.

Keys and bounds are checked on what came over the socket, never on what lies in shared memory. So no peer ever writes
into a region, and one that is malicious, frozen or killed at any instruction can spoil its own memory and nothing else.
What it lends can be taken back while it is read, which the reader notices by the lease.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from deeplink.errors import ConfigError, DeadlineExceeded, DeeplinkError, PeerGone, Refused
from deeplink.hookspecs import hookimpl
from deeplink.kvconnector.contracts import contract
from deeplink.kvconnector.transport import answer, arena, ring
from deeplink.kvconnector.transport.arena import Foreign, Loan
from deeplink.kvconnector.transport.base import Capabilities, Link, Push, Region, Transport
from deeplink.kvconnector.transport.regions import Regions
from deeplink.kvconnector.transport.ring import SLOT, SLOTS
from deeplink.kvconnector.transport.staging import Staging
from deeplink.kvconnector.wires import greeting, wire
from deeplink.kvconnector.wires.inbox import Inbox
from deeplink.kvconnector.wires.listener import Listener

NAME = "shm"
PURPOSE = "transport-shm"
IDLE_SECONDS = 24 * 3600.0
RETRY_SECONDS = 0.01
TRIAL_SECONDS = 5.0
MAX_PARTS = 512
LARGE = 256 << 10
"""Bytes of a part from which on copying may take longer than letting other threads run meanwhile."""

_COUNT = struct.Struct("<H")
_PART = struct.Struct("<16sQQ")
_LOAN = struct.Struct("<16sQQQIQ")
LOANS = 0xFFFF
"""In place of a number of parts: what follows is lent, and no slot is used."""


def place() -> str:
    """Where the sockets of this module reach: one network namespace of one boot of one kernel. Raises OSError.

    An abstract socket is found by everyone in its network namespace and by nobody else, whatever file systems they
    share. Containers with a namespace each are therefore two places, and use another transport.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}.{os.stat('/proc/self/ns/net').st_ino}"


class ShmLink:
    """`staging` is what the peer was given to read, if anything."""

    def __init__(self, sock: socket.socket, slots: list[memoryview], staging: Staging | None) -> None:
        self._shared = wire.Shared(sock)
        self._staging = staging
        self._slots = slots
        self._sent = 0
        self._unanswered = 0

    def push(self, pushes: Sequence[Push], deadline: float) -> None:
        with self._shared.use() as sock:
            if (loans := self._loans(pushes)) is not None:
                self._send_loans(sock, loans, deadline)
                return
            slot = self._free_slot(sock, deadline)
            parts: list[bytes] = []
            filled = 0
            for push in pushes:
                source = push.source.cast("B")
                size, done = source.nbytes, 0
                while True:
                    length = min(size - done, SLOT - filled)
                    _copy(slot[filled : filled + length], source[done : done + length], length)
                    parts.append(_PART.pack(push.key, push.offset + done, length))
                    filled, done = filled + length, done + length
                    if filled == SLOT or len(parts) == MAX_PARTS:
                        self._send_slot(sock, parts, deadline)
                        slot, parts, filled = self._free_slot(sock, deadline), [], 0
                    if done == size:
                        break
            if parts:
                self._send_slot(sock, parts, deadline)
            while self._unanswered:
                self._hear(sock, deadline)

    def close(self) -> None:
        self._shared.close()
        self._slots = []  # unmapped when a push that may be under way has ended too

    def _loans(self, pushes: Sequence[Push]) -> list[bytes] | None:
        """The pushes as loans, if all of them can be lent."""
        loans = []
        for push in pushes if self._staging is not None else ():
            assert self._staging is not None
            loan = self._staging.loan(push.source)
            if loan is None:
                return None
            loans.append(_LOAN.pack(push.key, push.offset, loan.length, loan.offset, loan.lease, loan.generation))
        return loans or None

    def _send_loans(self, sock: socket.socket, loans: list[bytes], deadline: float) -> None:
        for first in range(0, len(loans), MAX_PARTS):
            some = loans[first : first + MAX_PARTS]
            wire.send(sock, _COUNT.pack(LOANS) + _COUNT.pack(len(some)) + b"".join(some), deadline)
            self._unanswered += 1
            self._hear(sock, deadline)

    def _send_slot(self, sock: socket.socket, parts: list[bytes], deadline: float) -> None:
        wire.send(sock, _COUNT.pack(len(parts)) + b"".join(parts), deadline)
        self._sent += 1
        self._unanswered += 1

    def _free_slot(self, sock: socket.socket, deadline: float) -> memoryview:
        slots = self._slots
        if not slots:
            raise PeerGone("the connection is closed")
        if self._unanswered >= SLOTS:
            self._hear(sock, deadline)
        return slots[self._sent % SLOTS]

    def _hear(self, sock: socket.socket, deadline: float) -> None:
        self._unanswered -= answer.expect_some(sock, self._unanswered, deadline)


class ShmTransport:
    """Raises ConfigError where the kernel or the sandbox does not give what it needs, which a link to itself shows.

    `host` is not used.
    """

    name = NAME
    capabilities = Capabilities(memory=frozenset({"dram"}), cross_host=False, authenticated=True)

    def __init__(self, host: str, secret: bytes) -> None:
        self._secret = secret
        self._regions = Regions()
        self._staging: Staging | None = None
        try:
            self._place = place()
            os.close(ring.make())
            name = f"deeplink-{secrets.token_hex(16)}"
            listening = _listen(name)
        except OSError as exc:
            raise ConfigError(f"shared memory between processes cannot be used here: {exc}") from exc
        self.address = contract.local_address(self._place, name)
        self._listener = Listener(listening, secret, PURPOSE, self._serve)
        try:
            self.connect(self.address, time.monotonic() + TRIAL_SECONDS).close()
        except DeeplinkError as exc:
            self.close()
            raise ConfigError(f"shared memory between processes cannot be used here: {exc}") from exc

    def stage(self, memory: memoryview) -> None:
        """Nothing to prepare: this process's own threads move the bytes."""

    def lend(self, staging: Staging) -> None:
        self._staging = staging

    def register(self, memory: memoryview) -> Region:
        return self._regions.register(memory)

    def connect(self, address: str, deadline: float) -> Link:
        where = contract.place(address)
        if where != self._place:
            raise PeerGone(f"{address} is not on this host, or in another network namespace ({self._place})")
        sock = _dial(address.rpartition("/")[2], deadline)
        try:
            greeting.greet(sock, self._secret, PURPOSE, server=False, deadline=deadline)
            slots = ring.receive(sock, deadline)
            staging = self._staging
            if staging is None or staging.arena is None:
                arena.send_none(sock, deadline)
            else:
                staging.arena.send(sock, deadline)
            return ShmLink(sock, slots, staging)
        except DeeplinkError:
            sock.close()
            raise

    def close(self) -> None:
        self._listener.close()

    def _serve(self, sock: socket.socket) -> None:
        slots = ring.send(sock, time.monotonic() + answer.BODY_SECONDS)
        foreign = arena.receive(sock, time.monotonic() + answer.BODY_SECONDS)
        inbox = Inbox(sock)
        turn = 0
        while True:
            (count,) = _COUNT.unpack(inbox.take(_COUNT.size, time.monotonic() + IDLE_SECONDS))
            if count == LOANS:
                self._borrow(sock, inbox, foreign)
                continue
            if count > MAX_PARTS:
                raise answer.refuse(sock, f"{count} parts in one slot, at most {MAX_PARTS} may be")
            parts = list(_PART.iter_unpack(inbox.take(count * _PART.size, _soon())))
            total = sum([length for _, _, length in parts])
            if total > SLOT:
                raise answer.refuse(sock, f"{total} bytes in a slot of {SLOT}")
            try:
                with self._regions.writing(parts) as views:
                    _scatter(slots[turn], views)
            except Refused as exc:
                raise answer.refuse(sock, exc.message) from exc
            answer.accept(sock)
            turn = (turn + 1) % SLOTS

    def _borrow(self, sock: socket.socket, inbox: Inbox, foreign: Foreign | None) -> None:
        """Take the peer's bytes for those of a region where they are all of it, else copy them there."""
        (count,) = _COUNT.unpack(inbox.take(_COUNT.size, _soon()))
        if count > MAX_PARTS or foreign is None:
            raise answer.refuse(sock, f"{count} loans at once, at most {MAX_PARTS if foreign else 0} may be")
        parts = list(_LOAN.iter_unpack(inbox.take(count * _LOAN.size, _soon())))
        try:
            loans = [foreign.lent(Loan(at, length, lease, turn)) for _, _, length, at, lease, turn in parts]
            places = [(key, offset, length) for key, offset, length, *_ in parts]
            if count != 1 or not self._regions.lend(places[0], loans[0]):
                with self._regions.writing(places) as views:
                    for view, lent in zip(views, loans, strict=True):
                        _copy(view, lent.memory, view.nbytes)
        except Refused as exc:
            raise answer.refuse(sock, exc.message) from exc
        answer.accept(sock)


def _soon() -> float:
    return time.monotonic() + answer.BODY_SECONDS


def _scatter(slot: memoryview, views: list[memoryview]) -> None:
    position = 0
    for view in views:
        length = view.nbytes
        _copy(view, slot[position : position + length], length)
        position += length


def _copy(target: memoryview, source: memoryview, length: int) -> None:
    if length < LARGE:
        target[:] = source
    else:  # through numpy, which lets other threads run while it copies
        np.copyto(np.asarray(target), np.asarray(source))


def _listen(name: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(f"\0{name}")
        sock.listen(128)
    except OSError:
        sock.close()
        raise
    return sock


def _dial(name: str, deadline: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        while True:
            sock.settimeout(wire.remaining(deadline))
            try:
                sock.connect(f"\0{name}")
            except BlockingIOError:  # its queue is full; unlike TCP this does not wait by itself
                time.sleep(RETRY_SECONDS)
            else:
                sock.settimeout(None)
                return sock
    except OSError as exc:
        sock.close()
        raise PeerGone(
            f"cannot connect to {name} on this host: {exc}",
            remedy="if it runs and a sandbox is in the way, exclude the transport with DEEPLINK_DISABLE_PLUGINS=shm",
        ) from exc
    except DeadlineExceeded:
        sock.close()
        raise


@hookimpl
def deeplink_register_transports(register: Callable[[str, Callable[..., Transport]], None]) -> None:
    register(NAME, ShmTransport)
