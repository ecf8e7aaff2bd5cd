"""Bytes over a stream socket, each call with a deadline, and the greeting that proves both ends know the secret.

Deadlines are monotonic seconds. A broken connection is PeerGone, a late one DeadlineExceeded, bytes that make no
sense ProtocolError. Nothing here reads more than it was asked to.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

from deeplink import secret as shared
from deeplink.errors import DeadlineExceeded, LinkLost, PeerGone, ProtocolError, Refused

MAGIC = b"DLK1"
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
USER_TIMEOUT = 60_000
"""Milliseconds. With KEEPALIVE (seconds), a link that was silently cut is known to be dead after one minute, idle or
sending."""
_NONCE = 16
_MAC = 32
MAX_VIEWS = 64
"""Of one system call: enough that calls cost nothing beside the copy, few enough to list again after a short one."""


class Shared:
    """A socket that any thread may close while others are in a call on it; those calls fail.

    The descriptor is given back only when nobody uses it any more. Were its number taken by another socket while a
    thread still polls it, the kernel would wake that thread for the old socket, find the new one quiet, and let it
    sleep until its timeout.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        self._users = 0
        self._closed = False

    @contextlib.contextmanager
    def use(self) -> Iterator[socket.socket]:
        """The socket, for one call or several. Raises PeerGone when it has been closed."""
        with self._lock:
            if self._closed:
                raise PeerGone("the connection is closed")
            self._users += 1
        try:
            yield self._socket
        finally:
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


def broken(exc: OSError, what: str) -> PeerGone:
    """The error for a connection that does not work any more, or never did."""
    return (LinkLost if exc.errno in _CUT else PeerGone)(f"{what}: {exc}")


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
    except OSError as exc:
        raise broken(exc, f"cannot connect to {address}") from exc
    except (OverflowError, UnicodeError) as exc:  # UnicodeError: a host that cannot be a name
        raise PeerGone(f"cannot connect to {address}: {exc}") from exc
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


def send(sock: socket.socket, data: bytes | memoryview, deadline: float) -> None:
    view = memoryview(data)
    try:
        while view:
            sock.settimeout(remaining(deadline))
            view = view[sock.send(view) :]
    except TimeoutError as exc:
        raise DeadlineExceeded("the peer does not take what is sent") from exc
    except OSError as exc:
        raise broken(exc, "the connection broke while sending") from exc


def send_all(sock: socket.socket, views: Sequence[bytes | memoryview], deadline: float) -> None:
    """The bytes of all `views`, in order, in as few calls as the kernel takes them."""
    left = deque(memoryview(view) for view in views)
    try:
        while left:
            sock.settimeout(remaining(deadline))
            _advance(left, sock.sendmsg(list(islice(left, MAX_VIEWS))))
    except TimeoutError as exc:
        raise DeadlineExceeded("the peer does not take what is sent") from exc
    except OSError as exc:
        raise broken(exc, "the connection broke while sending") from exc


def receive_into_all(sock: socket.socket, views: Sequence[memoryview], deadline: float) -> None:
    """Fill all `views` completely, in order."""
    left = deque(view for view in views if view)
    try:
        while left:
            sock.settimeout(remaining(deadline))
            count = sock.recvmsg_into(list(islice(left, MAX_VIEWS)))[0]
            if count == 0:
                raise PeerGone("the peer closed the connection")
            _advance(left, count)
    except TimeoutError as exc:
        raise DeadlineExceeded("the peer sends nothing") from exc
    except OSError as exc:
        raise broken(exc, "the connection broke while receiving") from exc


def _advance(left: deque[memoryview], count: int) -> None:
    """Take away the first `count` bytes, and views that are empty."""
    while left and count >= left[0].nbytes:
        count -= left.popleft().nbytes
    if count:
        left[0] = left[0][count:]


def receive_into(sock: socket.socket, view: memoryview, deadline: float) -> None:
    """Fill `view` completely."""
    try:
        while view:
            sock.settimeout(remaining(deadline))
            count = sock.recv_into(view)
            if count == 0:
                raise PeerGone("the peer closed the connection")
            view = view[count:]
    except TimeoutError as exc:
        raise DeadlineExceeded("the peer sends nothing") from exc
    except OSError as exc:
        raise broken(exc, "the connection broke while receiving") from exc


def receive(sock: socket.socket, length: int, deadline: float) -> bytes:
    buffer = bytearray(length)
    receive_into(sock, memoryview(buffer), deadline)
    return bytes(buffer)


def readable(sock: socket.socket, seconds: float) -> bool:
    """Whether bytes (or the end of the stream) are there within `seconds`."""
    try:
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        return bool(poll.poll(seconds * 1000))
    except (OSError, ValueError) as exc:
        raise PeerGone(f"the connection is closed: {exc}") from exc


def ended(sock: socket.socket) -> bool:
    """Whether the stream is at its end now. Reads nothing, waits for nothing."""
    try:
        return readable(sock, 0) and not sock.recv(1, socket.MSG_PEEK)
    except OSError:
        return True


def greet(sock: socket.socket, secret: bytes, purpose: str, *, server: bool, deadline: float) -> None:
    """Mutual challenge and response: each side proves it knows the key derived for `purpose`.

    Both ends send a random number, then the MAC of both numbers and their own role, so an answer cannot be
    reflected. Raises Refused when the peer's secret is another, ProtocolError when it does not speak this.
    """
    key = shared.derive(secret, purpose)
    ours = secrets.token_bytes(_NONCE)
    send(sock, MAGIC + ours, deadline)
    hello = receive(sock, len(MAGIC) + _NONCE, deadline)
    if not hello.startswith(MAGIC):
        raise ProtocolError("the peer does not speak deeplink's protocol", field="magic", theirs=repr(hello[:4]))
    theirs = hello[len(MAGIC) :]
    nonces = theirs + ours if server else ours + theirs
    roles = (b"server", b"client") if server else (b"client", b"server")
    send(sock, hmac.digest(key, roles[0] + nonces, "sha256"), deadline)
    answer = receive(sock, _MAC, deadline)
    if not hmac.compare_digest(answer, hmac.digest(key, roles[1] + nonces, "sha256")):
        raise Refused(
            "the peer has another secret",
            field="secret",
            ours="(not shown)",
            theirs="(not shown)",
            remedy="give all engines and the router the same secret_file",
        )
