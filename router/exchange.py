"""One request of one client, from its arrival to its end."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Literal

from deeplink.errors import DeeplinkError
from deeplink.router.body import Body
from deeplink.router.engine import Engine
from deeplink.router.headers import PREFIX, Headers
from deeplink.router.tracing import Trace

GENERATING = ("/v1/completions", "/v1/chat/completions")

Phase = Literal["arrived", "prefilling", "decoding", "done"]


@dataclass(slots=True)
class Exchange:
    """What the flow does for it is written down here as it happens; the log and the answer's headers read it.

    `phase` is done only when the whole answer has come from the engine: until then something may be left to
    cancel. `error` is set where the answer had begun and could not be completed. `target` is the path with
    the client's query, as the engines get it. `asked` are the engines that have been sent their part of the handoff,
    `tries` how many more times something may be tried again, `tried` how many times it was. `cached` is what
    the prefill engine said of the prompt tokens it had cached. `ends` are the handoffs that were begun for it: who
    prefilled, who was last to decode, and whether it was finished. `trace` is set if spans are made.
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
    asked: list[Engine] = field(default_factory=list)
    tries: int = 0
    tried: int = 0
    method: str = "POST"
    cached: dict[str, Any] | None = None
    ends: list[tuple[str, str, bool]] = field(default_factory=list)
    trace: Trace | None = None

    @property
    def chat(self) -> bool:
        return self.path.endswith("/chat/completions")

    @property
    def kind(self) -> str:
        """Which path the request took; none as long as no engine was chosen."""
        return ("handoff" if self.handoff else "plain") if self.decode else "none"

    @property
    def finished(self) -> bool:
        return self.phase == "done"

    @property
    def generates(self) -> bool:
        """Whether the answer is made token after token from a prompt, so that it can be handed over."""
        return self.path in GENERATING

    def session(self, header: str) -> str:
        """What the client names its session by; "" if by nothing."""
        wanted = header.lower()
        named = next((value for name, value in self.headers if name.lower() == wanted), "")
        user = self.body.fields.get("user")
        return named or (user if isinstance(user, str) else "")

    def marks(self) -> Headers:
        """The x-deeplink-* headers of the answer."""
        marks = {
            "path": self.kind if self.decode else "",
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
