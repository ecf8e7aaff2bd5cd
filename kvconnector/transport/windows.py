"""Compiled: the bytes of a batch between memory and a socket, with their checksum, without the interpreter's lock.

A window is checksummed right before the kernel takes it or after it gave it, so each is a few system calls: by the
interpreter they cost as much as the copy, and two threads of one process take turns at them. Needs numba, Linux, and a
socket that is one of the kernel's own.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numba import types

from deeplink.errors import DeadlineExceeded, PeerGone
from deeplink.kvconnector.relayout.jit import part, whole
from deeplink.kvconnector.relayout.xxh3 import LINE, SECRET, STATE, begin, end, feed, read32
from deeplink.kvconnector.transport.batch import WINDOW
from deeplink.kvconnector.transport.pieces import address
from deeplink.kvconnector.wires import wire

SHORTEST = 256
"""Bytes that are worth it; shorter inputs have a checksum of another kind."""
_WAITED, _INTERRUPTED, _ENDED = 1, 2, 3
_DONTWAIT, _QUIET, _MORE = socket.MSG_DONTWAIT, getattr(socket, "MSG_NOSIGNAL", 0), getattr(socket, "MSG_MORE", 0)
_AGAIN, _EINTR = errno.EAGAIN, errno.EINTR
_IN, _OUT, _RDHUP = select.POLLIN, select.POLLOUT, getattr(select, "POLLRDHUP", 0)
_LEVEL, _LOWAT = socket.SOL_SOCKET, socket.SO_RCVLOWAT
_GATHER, _GATHER_MS, _MUCH = wire.GATHER, round(wire.GATHER_SECONDS * 1000), wire.MUCH
_MONOTONIC = 1
_FOR_EVER = 1e9
_SECRET: int = SECRET.ctypes.data
_VIEW, _OFFSET, _HASHED, _LEFT, _LOW, _ABLE = range(6)
"""Places of what is kept between two calls: the view and how far it has gone, lines and bytes so far, the socket's low
water mark and whether that may be raised."""

_send = types.ExternalFunction("send", types.intp(types.int32, types.intp, types.intp, types.int32))
_recv = types.ExternalFunction("recv", types.intp(types.int32, types.intp, types.intp, types.int32))
_poll = types.ExternalFunction("poll", types.int32(types.intp, types.intp, types.int32))
_set = types.ExternalFunction("setsockopt", types.int32(types.int32, types.int32, types.int32, types.intp, types.int32))
_clock = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.intp))
_errno = types.ExternalFunction("__errno_location", types.intp())


@part
def _problem() -> Any:
    """What the last call of this thread ran into. Signed: numba would make a float of it and a signed number."""
    return np.int64(read32(_errno()))


@part
def _wait(descriptor: int, events: int, deadline: int, most: int, scratch: Any) -> Any:
    """The events that came; 0 when `most` milliseconds (unless 0) or the time until `deadline` are over; an error is
    less than 0."""
    _clock(_MONOTONIC, scratch[2:].ctypes.data)
    left = (deadline - (scratch[2] * 1000000000 + scratch[3]) + 999999) // 1000000
    if left <= 0:
        return 0
    if left > 1 << 30:
        left = 1 << 30
    scratch[0] = descriptor | (events << 32)
    found = _poll(scratch.ctypes.data, 1, min(left, most) if most else left)
    if found < 0:
        return -_problem()
    return (scratch[0] >> 48) & 0xFFFF if found else 0


@part
def _late(deadline: int, scratch: Any) -> Any:
    _clock(_MONOTONIC, scratch[2:].ctypes.data)
    return deadline <= scratch[2] * 1000000000 + scratch[3]


@whole
def send_views(
    descriptor: int, views: Any, kept: Any, size: int, deadline: int, scratch: Any, secret: int, state: Any
) -> Any:
    """`views` are (address, length, whether it is checksummed); those that are, are whole lines.

    0 when all has been taken by the kernel; the checksum of `size` bytes is then in `state[0]`."""
    if kept[_HASHED] == 0 and kept[_VIEW] == 0 and kept[_OFFSET] == 0:
        begin(state)
    while kept[_VIEW] < views.shape[0]:
        start, length, hashed = views[kept[_VIEW]]
        while kept[_OFFSET] < length:
            at = kept[_OFFSET]
            stop = min((at // WINDOW + 1) * WINDOW, length)
            if hashed and kept[_LEFT] == 0:
                kept[_HASHED] = feed(start + at, stop - at, kept[_HASHED], size, secret, state)
            kept[_LEFT] = stop - at  # of the window, which is checksummed by now
            more = 0 if hashed else _MORE
            count = _send(descriptor, start + at, stop - at, _DONTWAIT | _QUIET | more)
            if count > 0:
                kept[_OFFSET] += count
                kept[_LEFT] -= count
                continue
            problem = _problem()
            if problem == _EINTR:
                return _INTERRUPTED
            if problem != _AGAIN:
                return -problem
            found = _wait(descriptor, _OUT | _RDHUP, deadline, 0, scratch)
            if found == 0:
                return _WAITED
            if found == -_EINTR:
                return _INTERRUPTED
            if found < 0:
                return found
            if found == _RDHUP:
                return _ENDED
        kept[_VIEW] += 1
        kept[_OFFSET] = 0
        kept[_LEFT] = 0
    state[0] = end(size, secret, state)
    return 0


@part
def _low(descriptor: int, kept: Any, wanted: int, scratch: Any) -> None:
    if kept[_LOW] != wanted:
        kept[_LOW] = wanted
        scratch[0] = wanted
        _set(descriptor, _LEVEL, _LOWAT, scratch.ctypes.data, 4)


@whole
def take_views(
    descriptor: int, views: Any, kept: Any, size: int, deadline: int, scratch: Any, secret: int, state: Any
) -> Any:
    """0 when all views are full; the checksum of their `size` bytes is then in `state[0]`. `kept[_LEFT]` is what they
    lack."""
    if kept[_HASHED] == 0 and kept[_VIEW] == 0 and kept[_OFFSET] == 0:
        begin(state)
    result = 0
    while result == 0 and kept[_VIEW] < views.shape[0]:
        start, length, hashed = views[kept[_VIEW]]
        while kept[_OFFSET] < length:
            at = kept[_OFFSET]
            first = at // WINDOW * WINDOW
            stop = min(first + WINDOW, length)
            count = _recv(descriptor, start + at, stop - at, _DONTWAIT)
            if count > 0:
                kept[_OFFSET] += count
                kept[_LEFT] -= count
                if hashed and at + count == stop:
                    kept[_HASHED] = feed(start + first, stop - first, kept[_HASHED], size, secret, state)
                continue
            problem = _problem()
            if count == 0:
                result = _ENDED
            elif problem == _EINTR:
                result = _INTERRUPTED
            elif problem != _AGAIN:
                result = -problem
            else:
                # Woken only when many bytes have come: each waking costs the sender, too.
                many = kept[_ABLE] != 0 and kept[_LEFT] >= _MUCH
                _low(descriptor, kept, min(kept[_LEFT], _GATHER) if many else 1, scratch)
                found = _wait(descriptor, _IN, deadline, _GATHER_MS if many else 0, scratch)
                if found == 0:
                    if not many or _late(deadline, scratch):
                        result = _WAITED
                    kept[_ABLE] = 0  # a slow link: any byte wakes from now on
                elif found == -_EINTR:
                    result = _INTERRUPTED
                elif found < 0:
                    result = found
            if result:
                break
        if result == 0:
            kept[_VIEW] += 1
            kept[_OFFSET] = 0
    _low(descriptor, kept, 1, scratch)
    if result == 0:
        state[0] = end(size, secret, state)
    return result


class Windows:
    """Of one socket, which is used by one thread at a time. What the loops work in is made once: every object costs
    more than usual where a copy has just swept the caches."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._kept, self._scratch = np.zeros(6, np.int64), np.zeros(4, np.int64)
        self._state = np.zeros(STATE, np.uint64)

    def able(self, views: Iterable[memoryview]) -> bool:
        """Whether these bytes can go this way."""
        lengths = [view.nbytes for view in views]
        return sum(lengths) >= SHORTEST and not any(length % LINE for length in lengths)

    def send(self, head: bytes, views: Sequence[memoryview], deadline: float) -> int:
        """Send the head and then the views; the checksum of the views. Raises what `wire.send_all` raises."""
        rows = [(address(memoryview(head)), len(head), 0), *[(address(view), view.nbytes, 1) for view in views]]
        self._kept[:] = 0
        return self._run(send_views, rows, deadline, "sending", "the peer does not take what is sent")

    def take(self, views: Sequence[memoryview], tail: memoryview, deadline: float) -> int:
        """Fill the views and then the tail; the checksum of the views. Raises what `wire.receive_into_all` raises."""
        rows = [*[(address(view), view.nbytes, 1) for view in views], (address(tail), tail.nbytes, 0)]
        self._kept[:] = 0
        self._kept[_LEFT:] = sum([row[1] for row in rows]), 1, 1
        return self._run(take_views, rows, deadline, "receiving", "the peer sends nothing")

    def _run(self, loop: Any, rows: list[tuple[int, int, int]], deadline: float, doing: str, waited: str) -> int:
        """The checksum, once all has been moved."""
        views = np.array(rows, np.int64)
        size = sum([length for _, length, hashed in rows if hashed])
        until = int(min(deadline, _FOR_EVER) * 1e9)
        while True:
            wire.remaining(deadline)
            result: int = loop(self._sock.fileno(), views, self._kept, size, until, self._scratch, _SECRET, self._state)
            if result < 0:
                broken = OSError(-result, os.strerror(-result))
                raise wire.broken(broken, f"the connection broke while {doing}") from broken
            if result == _WAITED:
                raise DeadlineExceeded(waited)
            if result == _ENDED:
                raise PeerGone("the peer closed the connection")
            if result != _INTERRUPTED:  # else a signal came, which only the interpreter can handle
                return int(self._state[0])


def of(sock: socket.socket) -> Windows | None:
    """None for a socket that is not the kernel's own: TLS has to see the bytes."""
    return Windows(sock) if type(sock) is socket.socket and sys.platform == "linux" else None


def warm() -> None:
    """Compile, by moving nothing."""
    if sys.platform == "linux":
        nothing = np.zeros((0, 3), np.int64)
        for loop in (send_views, take_views):
            kept = np.array([0, 0, 0, 0, 1, 0], np.int64)
            loop(-1, nothing, kept, 0, 0, np.zeros(4, np.int64), _SECRET, np.zeros(STATE, np.uint64))
