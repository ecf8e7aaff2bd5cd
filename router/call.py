"""One call to an engine: asking it, and judging what it answered before a byte of it goes to the client."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from deeplink.errors import DecodeFailed
from deeplink.router import openai, sse, usage
from deeplink.router.engine import Engine
from deeplink.router.exchange import Exchange
from deeplink.router.fleet import Fleet
from deeplink.router.headers import Headers
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


async def ask(
    upstream: Upstream,
    fleet: Fleet,
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
    headers = [*exchange.headers, *part.headers]
    if exchange.trace is None:
        return await _asked(upstream, fleet, engine, exchange, part.body, headers, until, late, fade)
    with exchange.trace.call(engine.name, exchange.phase, headers) as traced:
        return await _asked(upstream, fleet, engine, exchange, part.body, traced, until, late, fade)


async def _asked(
    upstream: Upstream,
    fleet: Fleet,
    engine: Engine,
    exchange: Exchange,
    body: bytes,
    headers: Headers,
    until: float | None,
    late: Callable[[], Awaitable[None]] | None,
    fade: Callable[[Coroutine[Any, Any, None]], None] | None,
) -> Opened:
    replies: list[Reply] = []
    if rank := rank_header(engine):
        headers = [pair for pair in headers if pair[0].lower() != RANK] + rank
    url = engine.url + exchange.target
    task = asyncio.create_task(_open(upstream, exchange.method, url, body, headers, replies))
    task.add_done_callback(_seen)
    try:
        while not task.done():
            now = time.monotonic()
            rest = TICK_SECONDS if until is None else min(TICK_SECONDS, until - now)
            await asyncio.wait({task}, timeout=max(rest, 0.0))
            if task.done():
                break
            if why := fleet.silent(engine):
                raise Lost(why)
            if until is not None and late is not None and time.monotonic() >= until:
                await late()
                until = None
        answered = task.result()
        replies.clear()
        return answered
    finally:
        # Whatever is left here was not handed over: the call failed or was given up.
        if fade is not None and not task.done():
            fade(_faded(task, replies))
        else:
            _dropped(task, replies)


async def relay(exchange: Exchange, fleet: Fleet, engine: Engine, opened: Opened) -> AsyncGenerator[bytes, None]:
    """A stream's bytes as they are, but for which tokens of a handoff were cached; then, if it broke, one event that
    says so and no ``[DONE]``."""
    events, reply = opened.events, opened.reply
    assert events is not None

    def told(whole: bytes) -> bytes:
        return usage.merged_events(whole, exchange.cached) if exchange.handoff else whole

    yield told(opened.data)
    why = ""
    with _watched(fleet, engine, reply):
        try:
            while chunk := await reply.chunk():
                if whole := events.feed(chunk):
                    yield told(whole)
        except Lost as lost:
            why = str(lost)
    rest = events.end() if not why else b""
    # Only these two ends have a mark of their own; other streams are whole if HTTP says so.
    if events.done or (not exchange.generates and not why):
        exchange.phase = "done"
        if rest:
            yield told(rest)
        return
    exchange.error = DecodeFailed(f"engine {engine.name} did not finish its answer: {why or 'the stream ended early'}")
    yield (b"\n\n" if events.torn else b"") + openai.event(exchange.error)


async def _faded(task: asyncio.Task[Opened], replies: list[Reply]) -> None:
    await asyncio.wait({task}, timeout=LINGER)
    _dropped(task, replies)


def _dropped(task: asyncio.Task[Opened], replies: list[Reply]) -> None:
    task.cancel()
    for reply in replies:
        reply.close()


async def _open(
    upstream: Upstream, method: str, url: str, body: bytes, headers: Headers, replies: list[Reply]
) -> Opened:
    reply = await upstream.send(method, url, headers, body or None)
    replies.append(reply)
    if reply.status != 200 or reply.media != "text/event-stream":
        return Opened(reply, await reply.read(MAX_ANSWER))
    events, head = sse.Events(), b""
    while chunk := await reply.chunk():
        head += events.feed(chunk)
        if (first := sse.first_data(head)) or len(head) > sse.MAX_EVENT:
            return Opened(reply, head, events, first or head)
    head += events.end()
    return Opened(reply, head, events, sse.first_data(head))


@contextmanager
def _watched(fleet: Fleet, engine: Engine, reply: Reply) -> Iterator[None]:
    """Closes `reply` when its engine is given up."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None

    def check() -> None:
        nonlocal timer
        if why := fleet.silent(engine, reply.heard):
            reply.close(why)
        else:
            timer = loop.call_later(TICK_SECONDS, check)

    check()
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()


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
