"""Pushes to a process on the same host, through a ring of shared memory per link.

The serving side makes a ring (a sealed memfd) for each peer that has passed the greeting and sends its descriptor
over their socket. The pusher copies into a slot of the ring and says over the socket what is in it: ``key, offset,
length`` per part. The serving side's thread checks keys and bounds on what came over the socket, never on what lies
in shared memory, copies the slot's bytes into the regions, and answers, which frees the slot.

So no peer ever maps a region. A peer that is malicious, frozen or killed at any instruction can spoil its own ring
and nothing else, and a withdrawn region is free once the copy under way, of one slot at most, is over. It costs a
second copy; the two run in two processes at once.
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
from deeplink.kvconnector import contract, wire
from deeplink.kvconnector.listener import Listener
from deeplink.kvconnector.transport import answer, ring
from deeplink.kvconnector.transport.base import Capabilities, Link, Push, Region, Transport
from deeplink.kvconnector.transport.regions import Regions
from deeplink.kvconnector.transport.ring import SLOT, SLOTS

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


def place() -> str:
    """Where the sockets of this module reach: one network namespace of one boot of one kernel. Raises OSError.

    An abstract socket is found by everyone in its network namespace and by nobody else, whatever file systems they
    share. Containers with a namespace each are therefore two places, and use another transport.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}.{os.stat('/proc/self/ns/net').st_ino}"


class ShmLink:
    def __init__(self, sock: socket.socket, slots: list[memoryview]) -> None:
        self._shared = wire.Shared(sock)
        self._slots = slots
        self._sent = 0
        self._unanswered = 0

    def push(self, pushes: Sequence[Push], deadline: float) -> None:
        with self._shared.use() as sock:
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

    def _send_slot(self, sock: socket.socket, parts: list[bytes], deadline: float) -> None:
        wire.send(sock, _COUNT.pack(len(parts)) + b"".join(parts), deadline)
        self._sent += 1
        self._unanswered += 1

    def _free_slot(self, sock: socket.socket, deadline: float) -> memoryview:
        slots = self._slots
        if not slots:
            raise PeerGone("the connection is closed")
        if self._unanswered == SLOTS:
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

    def register(self, memory: memoryview) -> Region:
        return self._regions.register(memory)

    def connect(self, address: str, deadline: float) -> Link:
        where = contract.place(address)
        if where != self._place:
            raise PeerGone(f"{address} is not on this host, or in another network namespace ({self._place})")
        sock = _dial(address.rpartition("/")[2], deadline)
        try:
            wire.greet(sock, self._secret, PURPOSE, server=False, deadline=deadline)
            return ShmLink(sock, ring.receive(sock, deadline))
        except DeeplinkError:
            sock.close()
            raise

    def close(self) -> None:
        self._listener.close()

    def _serve(self, sock: socket.socket) -> None:
        slots = ring.send(sock, time.monotonic() + answer.BODY_SECONDS)
        inbox = _Inbox(sock)
        turn = 0
        while True:
            (count,) = _COUNT.unpack(inbox.take(_COUNT.size, IDLE_SECONDS))
            if count > MAX_PARTS:
                raise answer.refuse(sock, f"{count} parts in one slot, at most {MAX_PARTS} may be")
            parts = list(_PART.iter_unpack(inbox.take(count * _PART.size, answer.BODY_SECONDS)))
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


class _Inbox:
    """What a peer says, taken from its socket in as few calls as it comes in."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._said = b""

    def take(self, length: int, seconds: float) -> bytes:
        if len(self._said) < length:
            deadline = time.monotonic() + seconds
            while len(self._said) < length:
                self._said += wire.receive_some(self._sock, SLOTS * (_COUNT.size + MAX_PARTS * _PART.size), deadline)
        found, self._said = self._said[:length], self._said[length:]
        return found


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
