"""What clients ask for, from a request to its answer: OpenAI's API with `Flow` behind it; the rest is the library's.

Every failure has the shape that OpenAI clients read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from deeplink.config import RouterSection
from deeplink.errors import DeeplinkError, NoEngine, RouteError, Unauthorized
from deeplink.router import body as bodies
from deeplink.router import coding, inner, openai
from deeplink.router.chooser import Counting, Known, Remembering
from deeplink.router.client import Client
from deeplink.router.direct import Direct
from deeplink.router.exchange import GENERATING, Answer, Exchange, Outgoing
from deeplink.router.flow import Begun, Flow
from deeplink.router.head import Head, canonical
from deeplink.router.headers import JSON_LINE, Headers, lines, texts, to_client, to_engine, unnamed
from deeplink.router.keys import Keys
from deeplink.router.logs import sayer
from deeplink.router.names import Names
from deeplink.router.paths import passes
from deeplink.router.tracing import Spans
from deeplink.router.upstream import Lost, Upstream

MODELS = "/v1/models"
MODELS_SECONDS = 10.0
MAX_MODELS = 4 << 20
METHODS = ("GET", "POST", "DELETE")
"""What engines' APIs are called with."""
LIBRARY = ("/health", "/metrics", "/deeplink")
JSON: Headers = [("Content-Type", "application/json")]

log = logging.getLogger("deeplink.router.app")

Library = Callable[[Head, bytes, Client], Coroutine[Any, Any, None]]


class Api:
    """`library` answers the paths of `LIBRARY`, once there is one; `keys` are those of clients, None if they need
    none."""

    def __init__(
        self,
        section: RouterSection,
        keys: Keys | None,
        fleet: Known,
        flow: Flow,
        upstream: Upstream,
        metrics: Counting,
        recent: Remembering,
        spans: Spans | None,
    ) -> None:
        self._section = section
        self._keys = keys
        self._fleet = fleet
        self.flow = flow
        self._upstream = upstream
        self.metrics = metrics
        self._recent = recent
        self._spans = spans
        self._say = sayer(log)
        self._session = Names({section.session_header.lower(): True}, False)
        self.library: Library | None = None

    # What a connection calls.

    def limit(self, head: Head) -> int:
        """Raises Unauthorized without one of the clients' keys; the library looks after its own."""
        if head.path not in GENERATING and _library(head.path):
            return inner.MAX_BODY
        if self._keys is not None:
            given = head.given.get(b"authorization", b"")
            if not self._keys.open_with_bytes(given):
                raise Unauthorized("the request has no key that opens this", remedy="send Authorization: Bearer KEY")
        return self._section.max_body

    def start(self, head: Head, body: bytes, client: Client) -> None:
        path, method = head.path, head.method
        try:
            if path in GENERATING:
                if method == "POST":
                    self._ask(head, client, bodies.parse(self._plain(head, body)))
                else:
                    _not_allowed(head, client, ["POST"])
            elif self.library is not None and _library(path):
                client.task(self.library(head, body, client))
            elif path == MODELS and method in ("GET", "HEAD"):
                client.task(self._models(head, client))
            elif not passes(path, self._section.paths):
                client.answer(404, JSON_LINE, openai.error(404, "not_found", f"{method} {path}: Not Found"))
                client.done()
            elif method not in METHODS:
                _not_allowed(head, client, METHODS)
            else:
                media = head.given.get(b"content-type", b"").decode("latin-1").lower()
                self._ask(head, client, bodies.other(self._plain(head, body), media))
        except DeeplinkError as error:
            client.answer(*self.refused(head, error))
            client.done()

    def refused(self, head: Head | None, error: DeeplinkError) -> tuple[int, bytes, bytes]:
        """Nothing of it is quoted, but for its path: as it was sent, since decoded it may hold line ends."""
        if head is None or not head.path:
            log.info("a request that is not HTTP was refused: status=%d code=%s", error.status, error.code)
        else:
            log.info("%s status=%d code=%s", head.target.partition("?")[0], error.status, error.code)
        self.metrics.refused(str(error.status), error.code)
        return told(*failed(error, []))

    # The engines' paths.

    def _plain(self, head: Head, body: bytes) -> bytes:
        """The body without its coding. Raises InvalidRequest or RequestTooLarge."""
        if b"content-encoding" not in head.given:
            return body
        named = head.given[b"content-encoding"].strip().lower().decode("latin-1")
        return coding.plain(body, named, self._section.max_body)

    def _outgoing(self, head: Head) -> Outgoing:
        named, key = b"connection" in head.given, self._keys is None
        pairs = to_engine(head.pairs, key=key) if named else unnamed(head.pairs, key=key)
        typed = b"content-type" in head.given
        head.outgoing = made = Outgoing(head.method, head.path, canonical(head), pairs, typed, self._session)
        return made

    def _ask(self, head: Head, client: Client, body: bodies.Body) -> None:
        exchange = Exchange(head.outgoing or self._outgoing(head), body, time.monotonic())
        if self._spans is not None:
            client.task(self._traced(exchange, client))
            return
        begun = None if body.stream else self.flow.begin(exchange)
        self._recent.begun(exchange)
        if begun is not None:
            client.runs(Direct(self, client, exchange, begun))
        else:
            client.task(self.serve(exchange, client, None))

    async def _traced(self, exchange: Exchange, client: Client) -> None:
        assert self._spans is not None
        with self._spans.request(exchange.outgoing.method, exchange.path, exchange.headers) as trace:
            exchange.trace = trace
            self._recent.begun(exchange)
            await self.serve(exchange, client, None)

    async def serve(self, exchange: Exchange, client: Client, begun: Begun | None) -> None:
        """All of a request; `begun` is its first call, if that has been made."""
        status, first = "", 0.0
        failure: DeeplinkError | None = None

        async def deliver(answer: Answer) -> None:
            nonlocal status, first
            status, first = str(answer.status), time.monotonic() - exchange.since
            self.metrics.first_byte(exchange, first)
            headers = lines(answer.headers + exchange.marks())
            if isinstance(answer.body, bytes):
                client.answer(answer.status, headers, answer.body)
            else:
                client.begin(answer.status, headers, answer.body.source)
                await answer.body.pour(client.more)
                client.finish()

        try:
            await self.flow.serve(exchange, deliver, begun)
        except DeeplinkError as error:
            failure, status = error, str(error.status)
            client.answer(*told(*failed(error, exchange.marks())))
        except asyncio.CancelledError:
            self.note(exchange, "gone", None, first)
            raise
        self.note(exchange, status, failure or exchange.error, first)

    def note(self, exchange: Exchange, status: str, failure: DeeplinkError | None, first: float) -> None:
        """One line in the log and one request in the metrics. Nothing of what was asked or answered is in either:
        messages may quote."""
        seconds = time.monotonic() - exchange.since
        code = failure.code if failure else ""
        self.metrics.ended(exchange, status, code, seconds)
        self._recent.ended(exchange, status, code, first, seconds)
        said = f"{exchange.outgoing.path} status={status} phase={exchange.phase}"
        if exchange.handoff:
            said += f" handoff={exchange.handoff} prefill={exchange.prefill}"
        if exchange.decode:
            said += f" decode={exchange.decode}"
        if exchange.tried:
            said += f" retries={exchange.tried}"
        if failure is not None:
            said += f" code={code} field={failure.field}" if failure.field else f" code={code}"
        self._say(f"{said} ms={1000 * seconds:.0f}")
        if exchange.trace is not None:
            exchange.trace.ended(
                status,
                {
                    "status": status,
                    "ms": f"{1000 * seconds:.0f}",
                    "phase": exchange.phase,
                    "handoff": exchange.handoff,
                    "prefill": exchange.prefill,
                    "decode": exchange.decode,
                    "retries": str(exchange.tried or ""),
                    "code": code,
                    "field": failure.field if failure else "",
                },
            )

    async def _models(self, head: Head, client: Client) -> None:
        try:
            answer = await self._listed(canonical(head), texts(to_engine(head.pairs, key=self._keys is None)))
        except DeeplinkError as error:
            client.answer(*self.refused(head, error))
        else:
            client.answer(answer.status, lines(answer.headers), answer.body)

    async def _listed(self, target: str, headers: Headers) -> Whole:
        """What the first engine that is up says. Raises NoEngine or RouteError."""
        fleet = self._fleet
        if all(engine.down for engine in fleet.table.engines):
            await fleet.look()
        up = sorted((e for e in fleet.table.engines if not e.down), key=lambda engine: not engine.consumes)
        if not up:
            raise NoEngine("no engine is up")
        try:
            return await asyncio.wait_for(self._fetch(up[0].url + target, headers), MODELS_SECONDS)
        except asyncio.TimeoutError as exc:
            raise RouteError(f"engine {up[0].name} did not answer within {MODELS_SECONDS:g} s") from exc
        except Lost as exc:
            raise RouteError(f"engine {up[0].name}: {exc}") from exc

    async def _fetch(self, url: str, headers: Headers) -> Whole:
        reply = await self._upstream.get(url, headers)
        try:
            return Whole(reply.status, texts(to_client(reply.pairs)), await reply.read(MAX_MODELS))
        finally:
            reply.close()


def told(status: int, headers: Headers, body: bytes) -> tuple[int, bytes, bytes]:
    return status, lines(headers), body


class Whole(NamedTuple):
    status: int
    headers: Headers
    body: bytes


def _library(path: str) -> bool:
    return path.startswith(LIBRARY) and path.split("/", 2)[1] in ("health", "metrics", "deeplink")


def _not_allowed(head: Head, client: Client, methods: Sequence[str]) -> None:
    message = f"{head.method} {head.path}: Method Not Allowed"
    allow = [("Allow", ",".join(sorted(methods)))]
    client.answer(405, lines(JSON + allow), openai.error(405, "method_not_allowed", message))
    client.done()


def failed(failure: DeeplinkError, marks: Headers) -> tuple[int, Headers, bytes]:
    """The answer that says it: status, headers and body."""
    headers = JSON + marks
    if failure.status == 401:
        headers = [*headers, ("WWW-Authenticate", "Bearer")]
    if failure.status == 429:
        headers = [*headers, ("Retry-After", "1")]
    return failure.status, headers, openai.body(failure)
