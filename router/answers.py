"""The bytes of an answer's head."""

from __future__ import annotations

import time
from email.utils import formatdate
from http import HTTPStatus

BODILESS = (204, 304)
_STATUS = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


class _Date:
    """The header, made once a second."""

    __slots__ = ("_line", "_second")

    def __init__(self) -> None:
        self._second = -1
        self._line = b""

    def line(self) -> bytes:
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._line = f"Date: {formatdate(second, usegmt=True)}\r\n".encode()
        return self._line


_date = _Date()


def head(status: int, headers: bytes, framing: bytes, *, last: bool) -> bytes:
    """All before the body. `headers` are lines, `framing` the one that says how the body ends; `last`: the connection
    ends with it."""
    start = _STATUS.get(status) or b"HTTP/1.1 %d \r\n" % status
    return b"%b%b%b%b%b\r\n" % (start, _date.line(), headers, framing, b"Connection: close\r\n" if last else b"")
