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
        self.held = b""
        self.done = False
        self.torn = False

    def feed(self, chunk: bytes) -> bytes:
        """The bytes that may be passed on now; together with `held` they are what came in, in order.

        Past MAX_EVENT an unfinished event is passed on too, so the memory of one stream is bounded.
        """
        data = self.held + chunk if self.held else chunk
        cut = max(at + len(end) if (at := data.rfind(end)) >= 0 else 0 for end in _ENDS)
        torn = not cut and len(data) > MAX_EVENT
        if torn:
            cut = len(data)
        whole, self.held = data[:cut], data[cut:]
        if whole:
            self.torn = torn
            self.done = _DONE.search(whole[-_TAIL:]) is not None
        return whole

    def end(self) -> bytes:
        """The stream ended in good order: what is still held, which may lack its blank line."""
        rest, self.held = self.held, b""
        if rest.strip():
            self.done = _DONE.search(rest[-_TAIL:]) is not None
        return rest


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
