"""Heads that come again. Pure.

On one connection messages begin alike: a client's requests, an engine's answers differ in their bodies, and so in how
long those are said to be. What was read of a head holds for the next one of the same bytes but for these digits: then
nothing of it need be read again. Only heads that arrive whole, in one piece, are compared; all others are the parser's,
as is the first of its kind. A client's head holds its key, so comparing takes as long for what is wrong as for what is
right (`keys`).
"""

from __future__ import annotations

import re
from hmac import compare_digest
from typing import Generic, TypeVar

MAX_HEAD = 4 << 10
"""Bytes of a head that is remembered: far from every limit that a longer length could go past."""
DIGITS = 9
"""Of a length."""
PATIENCE = 64
"""Heads that are passed over, at most, before one is remembered again, where none came twice."""
_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: ?([0-9]{1,%d})(?=\r\n)" % DIGITS, re.IGNORECASE)

T = TypeVar("T")


class Repeated(Generic[T]):
    """The head that was remembered last on a connection, and what it means. `left` is how much of the body was still to
    come when that head was last seen."""

    __slots__ = ("_after", "_before", "_pause", "_skip", "_start", "_used", "left", "meaning")

    meaning: T

    def __init__(self) -> None:
        self.left = 0
        self._before = self._after = b""
        self._start = 0  # where the digits do, if anything is remembered
        self._used = False
        self._pause = self._skip = 0

    def remember(self, message: bytes, size: int) -> bool:
        """Whether the head with which this begins was remembered; then the caller sets `meaning`, to what it says of
        any size. A parser has read that a body of `size` bytes follows. What cannot be told for sure is not
        remembered."""
        if self._skip:
            self._skip -= 1
            return False
        # One that never came again was remembered in vain.
        self._pause = 0 if self._used or not self._start else min(2 * self._pause + 1, PATIENCE)
        self._skip, self._used = self._pause, False
        self._start = 0
        end = message.find(_END, 0, MAX_HEAD) + len(_END)
        head = message[:end]
        if end < len(_END) or len(message) > end + size:
            return False
        # Where lines end, and so where the head does, must be the same to all who read it.
        if not head.count(b"\n") == head.count(b"\r") == head.count(b"\r\n"):
            return False
        lengths = list(_LENGTH.finditer(head))
        if len(lengths) != 1 or int(lengths[0][1]) != size:
            return False
        first, last = lengths[0].span(1)
        self._before, self._after, self._start = head[:first], head[last:], first
        return True

    def body(self, message: bytes) -> bytes | None:
        """What is here of the body, if this begins with a head that means the same, and no other message follows in it;
        else None."""
        start = self._start
        if not start or not compare_digest(message[:start], self._before):
            return None
        end = message.find(b"\r", start, start + DIGITS + 1)
        digits = message[start:end]
        begin = end + len(self._after)
        if end < 0 or not digits.isdigit() or not compare_digest(message[end:begin], self._after):
            return None
        body = message[begin:]
        left = int(digits) - len(body)
        if left < 0:
            return None
        self.left = left
        self._used = True
        return body
