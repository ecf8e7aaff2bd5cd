"""What is asked of engines, as bytes. Pure."""

from __future__ import annotations

MOST = 256
"""Engines whose heads are remembered at a time."""


class Asking:
    """What is asked of engines, but for the body: `lines` are header lines. For all requests that say the same."""

    __slots__ = ("_heads", "_lines", "_target", "method")

    def __init__(self, method: str, target: str, lines: bytes) -> None:
        self.method = method
        self._target = target
        self._lines = lines
        self._heads: dict[str, bytes] = {}

    def head(self, host: str) -> bytes:
        """All that is sent before the body's length."""
        head = self._heads.get(host)
        if head is None:
            if len(self._heads) >= MOST:
                self._heads.clear()
            # Bytes are passed on as they are, so nothing may be compressed on the way.
            start = f"{self.method} {self._target} HTTP/1.1\r\nHost: {host}\r\nAccept-Encoding: identity\r\n"
            head = self._heads[host] = start.encode("latin-1") + self._lines
        return head
