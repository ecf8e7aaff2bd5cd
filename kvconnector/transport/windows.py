"""Compiled: the bytes of a batch between memory and a socket, with their checksum, without the interpreter's lock.

A window is checksummed right before the kernel takes it or after it gave it, so each is a few system calls: by the
interpreter they cost as much as the copy, and two threads of one process take turns at them. Needs numba, Linux, and a
socket that is one of the kernel's own.
"""

from __future__ import annotations

import errno
import select
import socket
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from deeplink.errors import DeadlineExceeded, PeerGone
from deeplink.kvconnector import wire
from deeplink.kvconnector.jit import part, whole
from deeplink.kvconnector.transport.batch import WINDOW
from deeplink.kvconnector.transport.pieces import address
from deeplink.kvconnector.xxh3 import LINE, SECRET, STATE, begin, end, feed, read32

Views = npt.NDArray[np.int64]
"""Address, length, and whether it is checksummed, of each; those that are, are whole lines."""

SHORTEST = 256
"""Bytes that are worth it; shorter inputs have a checksum of another kind."""
_WAITED, _INTERRUPTED, _ENDED = 1, 2, 3
_DONTWAIT, _QUIET, _MORE = socket.MSG_DONTWAIT, getattr(socket, "MSG_NOSIGNAL", 0), getattr(socket, "MSG_MORE", 0)
_AGAIN, _EINTR = errno.EAGAIN, errno.EINTR
_IN, _OUT, _RDHUP = select.POLLIN, select.POLLOUT, getattr(select, "POLLRDHUP", 0)
_LEVEL, _LOWAT = socket.SOL_SOCKET, socket.SO_RCVLOWAT
_GATHER, _GATHER_MS, _MUCH = wire.GATHER, round(wire.GATHER_SECONDS * 1000), wire.MUCH
_MONOTONIC = 1
_VIEW, _OFFSET, _HASHED, _LEFT, _LOW, _ABLE = range(6)
"""Places of what is kept between two calls: the view and how far it has gone, lines and bytes so far, the socket's low
water mark and whether that may be raised."""

_send = types.ExternalFunction("send", types.intp(types.int32, types.intp, types.intp, types.int32))
_recv = types.ExternalFunction("recv", types.intp(types.int32, types.intp, types.intp, types.int32))
_poll = types.ExternalFunction("poll", types.int32(types.intp, types.intp, types.int32))
_set = types.ExternalFunction("setsockopt", types.int32(types.int32, types.int32, types.int32, types.intp, types.int32))
_clock = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.intp))
_errno = types.ExternalFunction("__errno_location", types.intp())


def able(sock: socket.socket, views: Iterable[memoryview]) -> bool:
    """Whether these bytes can go this way."""
    lengths = [view.nbytes for view in views]
    return (
        type(sock) is socket.socket
        and sys.platform == "linux"
        and sum(lengths) >= SHORTEST
        and not any(length % LINE for length in lengths)
    )


@part
def _wait(descriptor: int, events: int, deadline: int, most: int, scratch: Any) -> int:
    """The events that came, 0 when `most` milliseconds (if that is not 0) or the time until `deadline` are over, or less
    than 0 for an error."""
    _clock(_MONOTONIC, scratch[2:].ctypes.data)
    left = (deadline - (scratch[2] * 1000000000 + scratch[3]) + 999999) // 1000000
    if left <= 0:
        return 0
    if left > 1 << 30:
        left = 1 << 30
    scratch[0] = descriptor | (events << 32)
    found = _poll(scratch.ctypes.data, 1, min(left, most) if most else left)
    if found < 0:
        return -read32(_errno())
    return (scratch[0] >> 48) & 0xFFFF if found else 0


@part
def _late(deadline: int, scratch: Any) -> bool:
    _clock(_MONOTONIC, scratch[2:].ctypes.data)
    return deadline <= scratch[2] * 1000000000 + scratch[3]


@whole
def send_views(
    descriptor: int, views: Any, kept: Any, size: int, deadline: int, scratch: Any, secret: int, state: Any
) -> int:
    """0 when all has been taken by the kernel; the checksum of `size` bytes is then in `state[0]`."""
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
            problem = read32(_errno())
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
) -> int:
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
            problem = read32(_errno())
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


def send(sock: socket.socket, head: bytes, views: Sequence[memoryview], deadline: float) -> int:
    """Send the head and then the views; the checksum of the views. Raises what `wire.send_all` raises."""
    listed, _held = _listed([(memoryview(head), False), *((view, True) for view in views)])
    try:
        result, checksum = _run(send_views, sock, listed, deadline)
    except OSError as exc:
        raise wire.broken(exc, "the connection broke while sending") from exc
    if result == _WAITED:
        raise DeadlineExceeded("the peer does not take what is sent")
    if result == _ENDED:
        raise PeerGone("the peer closed the connection")
    return checksum


def take(sock: socket.socket, views: Sequence[memoryview], tail: memoryview, deadline: float) -> int:
    """Fill the views and then the tail; the checksum of the views. Raises what `wire.receive_into_all` raises."""
    listed, _held = _listed([*((view, True) for view in views), (tail, False)])
    try:
        result, checksum = _run(take_views, sock, listed, deadline)
    except OSError as exc:
        raise wire.broken(exc, "the connection broke while receiving") from exc
    if result == _WAITED:
        raise DeadlineExceeded("the peer sends nothing")
    if result == _ENDED:
        raise PeerGone("the peer closed the connection")
    return checksum


def _listed(views: list[tuple[memoryview, bool]]) -> tuple[Views, list[tuple[memoryview, bool]]]:
    """The views as the loops want them, and what must live as long as those run."""
    return np.array([(address(view), view.nbytes, hashed) for view, hashed in views], np.int64), views


def _run(loop: Any, sock: socket.socket, views: Views, deadline: float) -> tuple[int, int]:
    kept = np.zeros(6, np.int64)
    size = int(views[views[:, 2] == 1, 1].sum())
    if loop is take_views:
        kept[_LEFT], kept[_LOW], kept[_ABLE] = views[:, 1].sum(), 1, 1
    scratch, state = np.zeros(4, np.int64), np.zeros(STATE, np.uint64)
    until = int(min(deadline, 1e9) * 1e9)
    while True:
        wire.remaining(deadline)
        result = loop(sock.fileno(), views, kept, size, until, scratch, SECRET.ctypes.data, state)
        if result < 0:
            raise OSError(-result, "")
        if result != _INTERRUPTED:  # else a signal came, which only the interpreter can handle
            return result, int(state[0])


def warm() -> None:
    """Compile, by moving nothing."""
    scratch, kept, state = np.zeros(4, np.int64), np.zeros(6, np.int64), np.zeros(STATE, np.uint64)
    nothing = np.zeros((0, 3), np.int64)
    for loop in (send_views, take_views):
        kept[:] = 0
        kept[_LOW] = 1
        loop(-1, nothing, kept, 0, 0, scratch, SECRET.ctypes.data, state)
