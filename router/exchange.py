"""One request of one client, from its arrival to its end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from deeplink.errors import DeeplinkError
from deeplink.router.asking import Asking
from deeplink.router.body import Body
from deeplink.router.engine import Engine
from deeplink.router.headers import JSON_LINE, PREFIX, Headers, raw_lines, texts
from deeplink.router.names import Names
from deeplink.router.tracing import Trace

if TYPE_CHECKING:
    from deeplink.router.admission import Need

MAX_SESSION = 512
GENERATING = ("/v1/completions", "/v1/chat/completions")

Kind = Literal["none", "plain", "handoff"]
Phase = Literal["arrived", "prefilling", "decoding", "done"]


class Outgoing:
    """What engines get of a request's head; the same for all requests with that head.

    `target` is the path with the client's query, as the engines get it; `pairs` are the client's headers that they get,
    `typed` whether one of them says what the body is, `session` what the one named `header` says, or its beginning.
    `asking` is all that as it is sent before a body. `generates`: the answer is made token after token from a prompt,
    so that it can be handed over.
    """

    __slots__ = ("asking", "generates", "method", "pairs", "path", "session", "target", "typed")

    def __init__(
        self,
        method: str,
        path: str,
        target: str,
        pairs: list[tuple[bytes, bytes]],
        typed: bool,
        header: Names[bool],
    ) -> None:
        self.method, self.path, self.target, self.pairs, self.typed = method, path, target, pairs, typed
        found = next((value for name, value in pairs if value and header[name]), b"")
        self.session = found.decode("utf-8", "surrogateescape")[:MAX_SESSION]
        self.generates = path in GENERATING
        self.asking = Asking(method, target, raw_lines(pairs) + (b"" if typed else JSON_LINE))

    @property
    def headers(self) -> Headers:
        return texts(self.pairs)


@dataclass(slots=True, eq=False)
class Exchange:
    """What the flow does for it is written down here as it happens; the log and the answer's headers read it.

    `since` is when it arrived, of time.monotonic. `phase` is done only when the whole answer has come from the engine:
    until then something may be left to cancel. `error` is set where the answer had begun and could not be completed.
    `asked` are the engines that have been sent their part of the handoff, `tries` how many more times something may be
    tried again, `tried` how many times it was. `cached` is what the prefill engine said of the prompt tokens it had
    cached. `ends` are the handoffs that were begun for it: who prefilled, who was last to decode, and whether it was
    finished. `trace` is set if spans are made, `need` once what matters to the choice is known.
    """

    outgoing: Outgoing
    body: Body
    since: float
    phase: Phase = field(default="arrived", init=False)
    handoff: str = field(default="", init=False)
    prefill: str = field(default="", init=False)
    decode: str = field(default="", init=False)
    error: DeeplinkError | None = field(default=None, init=False)
    asked: tuple[Engine, ...] = field(default=(), init=False)
    tries: int = field(default=0, init=False)
    tried: int = field(default=0, init=False)
    cached: dict[str, Any] | None = field(default=None, init=False)
    ends: tuple[tuple[str, str, bool], ...] = field(default=(), init=False)
    trace: Trace | None = field(default=None, init=False)
    need: Need | None = field(default=None, init=False)

    def handed(self) -> None:
        """A handoff has come to its end, whatever that is."""
        self.ends += ((self.prefill, self.decode, self.finished),)

    @property
    def path(self) -> str:
        return self.outgoing.path

    @property
    def generates(self) -> bool:
        return self.outgoing.generates

    @property
    def headers(self) -> Headers:
        """Those of the client's that engines get."""
        return self.outgoing.headers

    @property
    def kind(self) -> Kind:
        """Which path the request took; none as long as no engine was chosen."""
        return ("handoff" if self.handoff else "plain") if self.decode else "none"

    @property
    def chat(self) -> bool:
        return self.path.endswith("/chat/completions")

    @property
    def finished(self) -> bool:
        return self.phase == "done"

    @property
    def session(self) -> str:
        """What the client names its session by, the beginning of it if that is long; "" if by nothing."""
        if self.outgoing.session:
            return self.outgoing.session
        user = self.body.fields.get("user")
        return user[:MAX_SESSION] if isinstance(user, str) else ""

    def marks(self) -> Headers:
        """The x-deeplink-* headers of the answer."""
        if not self.decode:
            return []
        marks: Headers = [(PREFIX + "path", self.kind)]
        if self.handoff:
            marks += [(PREFIX + "handoff", self.handoff), (PREFIX + "prefill", self.prefill)]
        return [*marks, (PREFIX + "decode", self.decode)]


class Source(Protocol):
    """What an answer comes from while it is streamed."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class Stream(Protocol):
    """The body of an answer that comes bit by bit; `source` is what it is read from."""

    @property
    def source(self) -> Source: ...

    async def pour(self, to: Callable[[bytes], None]) -> None:
        """Gives `to` all of it. Never raises for what the engine did: then the last is an event that says so."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the client is to get."""

    status: int
    headers: Headers
    body: bytes | Stream


Deliver = Callable[[Answer], Awaitable[None]]
"""Gives an answer to the client, to its end. Raises no DeeplinkError."""
