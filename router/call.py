"""One call to an engine: asking it, and judging what it answered before a byte of it goes to the client."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from deeplink.errors import DecodeFailed
from deeplink.router import openai, sse, usage
from deeplink.router.asking import Asking
from deeplink.router.chooser import Known
from deeplink.router.engine import Engine
from deeplink.router.exchange import Exchange, Outgoing
from deeplink.router.headers import JSON_LINE, Headers, lines, raw_lines
from deeplink.router.kinds import LINGER, RANK, Part, rank_header
from deeplink.router.upstream import Lost, Reply, Upstream

MAX_ANSWER = 64 << 20
TICK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Opened:
    """An answer that has begun. `data` is all of it, or, with `events`, all up to the first event's end;
    `first` is that event's data. The holder closes `reply`."""

    reply: Reply
    data: bytes
    events: sse.Events | None = None
    first: bytes = b""

    @property
    def ok(self) -> bool:
        return self.reply.status == 200

    def fault(self) -> str:
        """What is wrong with this answer, if it says 200; "" if nothing."""
        if self.events is not None:
            if error := sse.error_in(self.first):
                return str(error.get("message") or "an error without a message")
            return "" if self.first else "an empty stream"
        if not self.data.strip():
            return "an empty answer"
        # Without a length only the text itself shows that its end is missing.
        return "" if self.reply.framed or _is_json(self.data) else "an answer cut short"

    def client_error(self) -> tuple[int, bytes] | None:
        """Status and body, if the first event is an error that the client made: the engine could not say it
        with the status because its stream had begun."""
        error = sse.error_in(self.first)
        code = error.get("code") if error else None
        if isinstance(code, int) and 400 <= code < 500:
            return code, json.dumps({"error": error}).encode()
        return None


class Calls:
    """Asks engines. One clock looks after all calls: one that waits for an engine that was given up ends."""

    def __init__(self, upstream: Upstream, fleet: Known) -> None:
        self._upstream = upstream
        self._fleet = fleet
        self._open: dict[Reply, Engine] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def ask(
        self,
        engine: Engine,
        exchange: Exchange,
        part: Part,
        until: float | None = None,
        late: Callable[[], Awaitable[None]] | None = None,
        fade: Callable[[Coroutine[Any, Any, None]], None] | None = None,
    ) -> Opened:
        """Send one request and wait for its whole answer, or the first event of a stream.

        Past `until` (of time.monotonic) `late` is called: it raises, or returns if the deadline no longer counts.
        Raises NotSent, or Lost also when the engine is given up. If it raises or is cancelled the call is
        dropped; with `fade` it is given what waits a little for an answer before it drops the call.
        """
        rank, outgoing = rank_header(engine), exchange.outgoing
        if exchange.trace is None and not part.headers and not rank:
            return await self._asked(engine, _asking(outgoing, part.body), part.body, until, late, fade)
        headers = [*exchange.headers, *part.headers]
        if exchange.trace is None:
            asking = _asking(outgoing, part.body, _ranked(headers, rank))
            return await self._asked(engine, asking, part.body, until, late, fade)
        with exchange.trace.call(engine.name, exchange.phase, headers) as traced:
            asking = _asking(outgoing, part.body, _ranked(traced, rank))
            return await self._asked(engine, asking, part.body, until, late, fade)

    async def _asked(
        self,
        engine: Engine,
        asking: Asking,
        body: bytes,
        until: float | None,
        late: Callable[[], Awaitable[None]] | None,
        fade: Callable[[Coroutine[Any, Any, None]], None] | None,
    ) -> Opened:
        reply = self._send(engine, asking, body)
        if until is None and fade is None:
            return await self.opened(reply)
        task = asyncio.create_task(opened(reply))
        task.add_done_callback(_seen)
        kept = False
        try:
            await asyncio.wait({task}, timeout=None if until is None else max(until - time.monotonic(), 0.0))
            if not task.done() and late is not None:
                await late()
                await asyncio.wait({task})
            answer = task.result()
            kept = True
            return answer
        finally:
            # Whatever is left here was not handed over: the call failed or was given up.
            if fade is not None and not task.done():
                fade(_faded(task, reply))
            elif not kept:
                _dropped(task, reply)

    def begin(self, engine: Engine, exchange: Exchange) -> Reply:
        """Sends the client's own request, and waits for nothing. Pass the reply to `opened`, or to `done` once it is
        over."""
        outgoing, body = exchange.outgoing, exchange.body.raw
        if engine.rank is None:
            return self._send(engine, _asking(outgoing, body), body)
        return self._send(engine, _asking(outgoing, body, _ranked(outgoing.headers, rank_header(engine))), body)

    async def opened(self, reply: Reply) -> Opened:
        """As `ask`, of what was sent."""
        try:
            with reply.closed_unless_done():
                return await opened(reply)
        finally:
            if reply.over:
                self.done(reply)

    def done(self, reply: Reply) -> None:
        self._open.pop(reply, None)

    def _send(self, engine: Engine, asking: Asking, body: bytes) -> Reply:
        reply = self._upstream.call(engine.url, asking, body)
        self._open[reply] = engine
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._look)
        return reply

    def _look(self) -> None:
        self._timer = None
        for reply, engine in tuple(self._open.items()):
            if reply.over:
                del self._open[reply]
            elif why := self._fleet.silent(engine, reply.heard):
                reply.close(why)
        if self._open:
            self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._look)


class Relay:
    """A stream's bytes as they are, but for which tokens of a handoff were cached; then, if it broke, one event that
    says so and no ``[DONE]``."""

    def __init__(self, exchange: Exchange, engine: Engine, opened: Opened) -> None:
        assert opened.events is not None
        self._exchange = exchange
        self._engine = engine
        self._data = opened.data
        self._events: sse.Events = opened.events
        self._to: Callable[[bytes], None] = lambda data: None
        self.source = opened.reply

    async def pour(self, to: Callable[[bytes], None]) -> None:
        """Gives `to` all of it, as it comes. Never raises for what the engine did."""
        exchange, events = self._exchange, self._events
        self._to = to
        to(self._told(self._data))
        why = ""
        try:
            await self.source.pour(self._came)
        except Lost as lost:
            why = str(lost)
        rest = events.end() if not why else b""
        # Only these two ends have a mark of their own; other streams are whole if HTTP says so.
        if events.done or (not exchange.generates and not why):
            exchange.phase = "done"
            if rest:
                to(self._told(rest))
            return
        name = self._engine.name
        exchange.error = DecodeFailed(f"engine {name} did not finish its answer: {why or 'the stream ended early'}")
        to((b"\n\n" if events.torn else b"") + openai.event(exchange.error))

    def _came(self, data: bytes) -> None:
        if whole := self._events.feed(data):
            self._to(self._told(whole))

    def _told(self, whole: bytes) -> bytes:
        return usage.merged_events(whole, self._exchange.cached) if self._exchange.handoff else whole


async def opened(reply: Reply) -> Opened:
    """Its whole answer, or the first event of a stream. Raises NotSent or Lost."""
    await reply.begun()
    if reply.status != 200 or not reply.streams:
        return Opened(reply, await reply.read(MAX_ANSWER))
    events, head = sse.Events(), b""
    while chunk := await reply.chunk():
        head += events.feed(chunk)
        if (first := sse.first_data(head)) or len(head) > sse.MAX_EVENT:
            return Opened(reply, head, events, first or head)
    head += events.end()
    return Opened(reply, head, events, sse.first_data(head))


async def _faded(task: asyncio.Task[Opened], reply: Reply) -> None:
    await asyncio.wait({task}, timeout=LINGER)
    _dropped(task, reply)


def _dropped(task: asyncio.Task[Opened], reply: Reply) -> None:
    task.cancel()
    reply.close()


def _asking(outgoing: Outgoing, body: bytes, headers: Headers | None = None) -> Asking:
    """With these headers, if not with the client's own."""
    if headers is None and (body or outgoing.typed):
        return outgoing.asking
    head = raw_lines(outgoing.pairs) if headers is None else lines(headers)
    return Asking(outgoing.method, outgoing.target, head + JSON_LINE if body and not outgoing.typed else head)


def _ranked(headers: Headers, rank: Headers) -> Headers:
    return [pair for pair in headers if pair[0].lower() != RANK] + rank if rank else headers


def _seen(task: asyncio.Task[Opened]) -> None:
    """A dropped call may still end with an error; it is of no interest to anyone."""
    if not task.cancelled():
        task.exception()


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True
