"""Bytes over a stream socket, each call with a deadline.

Deadlines are monotonic seconds. A broken connection is PeerGone, a late one DeadlineExceeded, bytes that make no
sense ProtocolError. Nothing here reads more than it was asked to.

A socket has no timeout of its own: one that two threads use could be given only one. Each call tries, and waits for
the socket by itself when the kernel says "not yet".
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import ssl
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import islice

from deeplink.errors import DeadlineExceeded, LinkLost, PeerGone, ProtocolError
from deeplink.kvconnector.wires import tls as security

KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
USER_TIMEOUT = 60_000
"""Milliseconds. With KEEPALIVE (seconds), a link that was silently cut is known to be dead after one minute, idle or
sending."""
TRY_AGAIN = 1_000
"""Milliseconds between attempts to pass a link that is down, at most. A kernel left to itself doubles the time with
each attempt: after an outage of 2 s a transfer went on 1.6 s after the link was back, after one of 8 s only after 10.6.
"""
_TCP_RTO_MAX_MS = 44
GATHER = 128 << 10
"""Bytes for which a reader sleeps. Over loopback the sender does the waking: at 64 KiB it needs 0.2 s of a core for
1 GB, woken for every segment 0.3 (a 2-core virtual machine)."""
GATHER_SECONDS = 0.05
"""A slow link is not waited for, nor a kernel (before Linux 4.18) whose buffer is full with less."""
MUCH = 4 << 10
"""Bytes for which it is worth asking the kernel to let a reader sleep."""
_ENDED = getattr(select, "POLLRDHUP", 0)
"""A peer that closed when it had said that it takes no more for now is never heard of again: its kernel answers the
probes, but has nothing to reset. No peer goes on reading once it has ended its own stream."""
NOT_YET = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
MAX_VIEWS = 64
"""Of one system call: enough that calls cost nothing beside the copy, few enough to list again after a short one."""


class Shared:
    """A socket that any thread may close while others are in a call on it (``with shared.use() as sock``); those calls
    fail.

    The descriptor is given back only when nobody uses it any more. Were its number taken by another socket while a
    thread still polls it, the kernel would wake that thread for the old socket, find the new one quiet, and let it
    sleep until its timeout.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        self._users = 0
        self._closed = False

    def use(self) -> Shared:
        """A context in which the socket can be used, for one call or several. Raises PeerGone when it has been closed.

        This is its own context: a generator's would cost more than a call of the kernel's.
        """
        return self

    def __enter__(self) -> socket.socket:
        with self._lock:
            if self._closed:
                raise PeerGone("the connection is closed")
            self._users += 1
        return self._socket

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self._users -= 1
            if self._closed and not self._users:
                self._socket.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            if not self._users:
                self._socket.close()


_CUT = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN})
"""What the kernel says of a peer it hears nothing of, as opposed to one that has closed or never listened."""


def broken(exc: Exception, what: str) -> PeerGone:
    """The error for a connection that does not work any more, or never did."""
    cut = isinstance(exc, OSError) and exc.errno in _CUT
    return (LinkLost if cut else PeerGone)(f"{what}: {exc}")


def remaining(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded("the handoff's time ran out")
    return left


def connect(address: str, deadline: float) -> socket.socket:
    """Connect to ``host:port``. The caller owns the socket."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ProtocolError(f"{address!r} is not host:port")
    try:
        sock = socket.create_connection((host.strip("[]"), int(port)), remaining(deadline))
    except TimeoutError as exc:
        raise DeadlineExceeded(f"no answer from {address}") from exc
    except (OSError, OverflowError, UnicodeError) as exc:  # UnicodeError: a host that cannot be a name
        raise broken(exc, f"cannot connect to {address}") from exc
    sock.settimeout(None)
    tune(sock)
    return sock


def tune(sock: socket.socket) -> None:
    """What every connection needs, whichever side opened it: no delay, and an end when the link is dead.

    Connections are kept idle between handoffs for as long as both engines live. A firewall that forgets one says so to
    neither side; without this, the next handoff would wait on it until its deadline.
    """
    options = [(socket.IPPROTO_TCP, "TCP_NODELAY", 1), (socket.SOL_SOCKET, "SO_KEEPALIVE", 1)]
    options += [(socket.IPPROTO_TCP, name, value) for name, value in KEEPALIVE.items()]
    options.append((socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", USER_TIMEOUT))
    for level, name, value in options:
        # Systems and sandboxes lack some of these, and a peer may have gone: the first use of the socket will tell.
        with contextlib.suppress(AttributeError, OSError):
            sock.setsockopt(level, getattr(socket, name), value)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # before Linux 6.15
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, TRY_AGAIN)


def send(sock: socket.socket, data: bytes | memoryview, deadline: float) -> None:
    """All of it; what is short goes in one call."""
    remaining(deadline)
    try:
        sent = sock.send(data, socket.MSG_DONTWAIT)
    except NOT_YET:
        sent = 0
    except (OSError, ValueError) as exc:
        raise broken(exc, "the connection broke while sending") from exc
    if sent < len(data):
        send_all(sock, [memoryview(data)[sent:]], deadline)


def send_all(sock: socket.socket, views: Sequence[bytes | memoryview], deadline: float) -> None:
    """The bytes of all `views`, in order, in as few calls as the kernel takes them."""
    left = deque(memoryview(view) for view in views)
    try:
        while left:
            seconds = remaining(deadline)
            try:
                _advance(left, sock.sendmsg(list(islice(left, MAX_VIEWS)), [], socket.MSG_DONTWAIT))
            except NOT_YET as exc:
                found = _poll(sock, _event(exc, select.POLLOUT) | _ENDED, seconds)
                if not found:
                    raise DeadlineExceeded("the peer does not take what is sent") from exc
                if found == _ENDED:
                    raise PeerGone("the peer closed the connection") from exc
    except (OSError, ValueError) as exc:
        raise broken(exc, "the connection broke while sending") from exc


def receive_into_all(sock: socket.socket, views: Sequence[memoryview], deadline: float) -> None:
    """Fill all `views` completely, in order."""
    left = deque(view for view in views if view)
    size = sum(view.nbytes for view in left)
    try:
        with _Sleep(sock, size) as sleep:
            while left:
                seconds = remaining(deadline)
                try:
                    count = sock.recvmsg_into(list(islice(left, MAX_VIEWS)), 0, socket.MSG_DONTWAIT)[0]
                except NOT_YET as exc:
                    if not _poll(sock, _event(exc, select.POLLIN), sleep.until(size, seconds)) and not sleep.shorten():
                        raise DeadlineExceeded("the peer sends nothing") from exc
                    continue
                if count == 0:
                    raise PeerGone("the peer closed the connection")
                size -= count
                _advance(left, count)
    except (OSError, ValueError) as exc:
        raise broken(exc, "the connection broke while receiving") from exc


class _Sleep:
    """Wakes a reader only when many bytes have come, or the stream has ended: each waking costs the sender too."""

    def __init__(self, sock: socket.socket, size: int) -> None:
        self._sock = sock
        # A UNIX socket has no such option; TLS keeps bytes of its own, so that fewer may come.
        self._able = size >= MUCH and sock.family is not socket.AF_UNIX and not isinstance(sock, security.TlsSocket)
        self._size = 1

    def __enter__(self) -> _Sleep:
        return self

    def until(self, size: int, seconds: float) -> float:
        """Sleep until `size` bytes are there, or GATHER; for how long at most."""
        self._set(min(size, GATHER) if self._able and size >= MUCH else 1)
        return seconds if self._size == 1 else min(seconds, GATHER_SECONDS)

    def shorten(self) -> bool:
        """After a sleep that was too long: any byte wakes from now on. False when it did so before."""
        self._able = False
        return self._size > 1

    def __exit__(self, *raised: object) -> None:
        if self._size != 1:
            with contextlib.suppress(OSError):
                self._set(1)

    def _set(self, size: int) -> None:
        if size != self._size:
            self._size = size
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)


def _advance(left: deque[memoryview], count: int) -> None:
    """Take away the first `count` bytes, and views that are empty."""
    while left and count >= left[0].nbytes:
        count -= left.popleft().nbytes
    if count:
        left[0] = left[0][count:]


def receive_into(sock: socket.socket, view: memoryview, deadline: float) -> None:
    """Fill `view` completely."""
    receive_into_all(sock, [view], deadline)


def receive_some(sock: socket.socket, view: memoryview, deadline: float) -> int:
    """Wait for bytes and take those that are there, from 1 to as many as fit into `view`; how many they are."""
    try:
        while True:
            seconds = remaining(deadline)
            try:
                count: int = sock.recvmsg_into([view], 0, socket.MSG_DONTWAIT)[0]
            except NOT_YET as exc:
                if not _poll(sock, _event(exc, select.POLLIN), seconds):
                    raise DeadlineExceeded("the peer sends nothing") from exc
                continue
            if not count:
                raise PeerGone("the peer closed the connection")
            return count
    except (OSError, ValueError) as exc:
        raise broken(exc, "the connection broke while receiving") from exc


def receive(sock: socket.socket, length: int, deadline: float) -> bytes:
    buffer = bytearray(length)
    receive_into_all(sock, [memoryview(buffer)], deadline)
    return bytes(buffer)


def readable(sock: socket.socket, seconds: float) -> bool:
    """Whether bytes (or the end of the stream) are there within `seconds`."""
    try:
        if isinstance(sock, security.TlsSocket) and sock.pending():
            return True
        return bool(_poll(sock, select.POLLIN, seconds))
    except (OSError, ValueError) as exc:
        raise PeerGone(f"the connection is closed: {exc}") from exc


def ended(sock: socket.socket) -> bool:
    """Whether the stream is known to be at its end. Reads nothing, waits for nothing; of TLS it cannot tell."""
    try:
        return readable(sock, 0) and not isinstance(sock, security.TlsSocket) and not sock.recv(1, socket.MSG_PEEK)
    except (OSError, PeerGone):
        return True


def _poll(sock: socket.socket, event: int, seconds: float) -> int:
    """What has happened within `seconds`; 0 for nothing."""
    poll = select.poll()
    poll.register(sock, event)
    return next((found for _, found in poll.poll(seconds * 1000)), 0)


def _event(problem: OSError, event: int) -> int:
    """What to wait for: TLS may have to read before it can write, and the other way round."""
    if isinstance(problem, ssl.SSLWantReadError):
        return select.POLLIN
    return select.POLLOUT if isinstance(problem, ssl.SSLWantWriteError) else event
