"""Server-sent events as bytes: where one ends, whether it is an error, whether the stream came to its end.
Pure.

Bytes are passed on as they are. Only the unfinished last event is held back until the rest of it arrives: a
client can do nothing with half an event, and if the engine dies in the middle of one, what follows must not
be read as part of it.
"""

from __future__ import annotations

import json
import re
from typing import Any

MAX_EVENT = 4 << 20
_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
_DONE = re.compile(rb"(?:^|[\r\n])data: ?\[DONE\]\s*$")
_TAIL = 64


class Events:
    """Cuts a byte stream after whole events. `done` says that the last whole event was ``data: [DONE]``,
    `torn` that what was passed on last does not end with an event."""

    def __init__(self) -> None:
        self.done = False
        self.torn = False
        self._held = bytearray()

    def feed(self, chunk: bytes) -> bytes:
        """The bytes that may be passed on now. Past MAX_EVENT an unfinished event is passed on too, so the
        memory of one stream is bounded."""
        if not self._held and chunk.endswith(_ENDS):
            return self._passed(chunk)
        # Only what is new is searched: the end of an event may have begun in what is held.
        start = max(0, len(self._held) - 3)
        self._held += chunk
        cut = max(at + len(end) if (at := self._held.rfind(end, start)) >= 0 else 0 for end in _ENDS)
        torn = not cut and len(self._held) > MAX_EVENT
        if torn:
            cut = len(self._held)
        whole = bytes(self._held[:cut])
        del self._held[:cut]
        return self._passed(whole, torn=torn)

    def end(self) -> bytes:
        """The stream ended in good order: what is still held, which may lack its blank line."""
        whole = bytes(self._held)
        self._held.clear()
        return self._passed(whole) if whole.strip() else whole

    def _passed(self, whole: bytes, *, torn: bool = False) -> bytes:
        if whole:
            self.torn = torn
            self.done = _DONE.search(whole[-_TAIL:]) is not None
        return whole


def first_data(whole: bytes) -> bytes:
    """The data of the first event that has any; b"" if there are only comments so far."""
    lines: list[bytes] = []
    for line in whole.splitlines():
        if line.startswith(b"data:"):
            lines.append(line[5:].removeprefix(b" "))
        elif not line and lines:
            break
    return b"\n".join(lines)


def error_in(data: bytes) -> dict[str, Any] | None:
    """The error an event's data states, as OpenAI's error object, or None."""
    if b"error" not in data:
        return None
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    if value.get("object") == "error":
        return value
    error = value.get("error")
    if isinstance(error, dict):
        return error
    return {"message": str(error)} if error else None
