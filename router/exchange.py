"""One request of one client, from its arrival to its end."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Literal

from deeplink.errors import DeeplinkError
from deeplink.router.body import Body
from deeplink.router.headers import PREFIX, Headers

Phase = Literal["arrived", "prefilling", "decoding", "done"]


@dataclass(slots=True)
class Exchange:
    """What the flow does for it is written down here as it happens; the log and the answer's headers read it.

    `phase` is done only when the whole answer has come from the engine: until then something may be left to
    cancel. `error` is set where the answer had begun and could not be completed. `target` is the path with
    the client's query, as the engines get it.
    """

    path: str
    target: str
    headers: Headers
    body: Body
    phase: Phase = "arrived"
    handoff: str = ""
    prefill: str = ""
    decode: str = ""
    error: DeeplinkError | None = None

    @property
    def chat(self) -> bool:
        return self.path.endswith("/chat/completions")

    def marks(self) -> Headers:
        """The x-deeplink-* headers of the answer."""
        marks = {
            "path": ("handoff" if self.handoff else "plain") if self.decode else "",
            "handoff": self.handoff,
            "prefill": self.prefill,
            "decode": self.decode,
        }
        return [(PREFIX + name, value) for name, value in marks.items() if value]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the client is to get. A stream never raises for what the engine did: it ends with an error
    event."""

    status: int
    headers: Headers
    body: bytes | AsyncGenerator[bytes, None]
