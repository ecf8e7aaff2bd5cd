"""The bytes of an answer's head. Pure but for the date."""

from __future__ import annotations

import time
from email.utils import formatdate
from http import HTTPStatus

Pairs = list[tuple[str, str]]

_STATUS = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}
BODILESS = (204, 304)


class _Date:
    """The header, made once a second."""

    __slots__ = ("_line", "_second")

    def __init__(self) -> None:
        self._second = -1
        self._line = ""

    def line(self) -> str:
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._line = f"Date: {formatdate(second, usegmt=True)}\r\n"
        return self._line


_date = _Date()


def head(status: int, headers: Pairs, framing: str, *, last: bool) -> bytes:
    """All before the body. `framing` is the header line that says how the body ends; `last`: the connection ends with
    it. Raises ValueError for a header that would end its line itself."""
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers])
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
        raise ValueError("a line end within a header")
    if last:
        framing += "Connection: close\r\n"
    start = _STATUS.get(status) or f"HTTP/1.1 {status} \r\n"
    return f"{start}{_date.line()}{lines}{framing}\r\n".encode("utf-8", "surrogateescape")
