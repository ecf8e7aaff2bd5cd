"""How a ticket comes from a request's body to the scheduler.

deeplink's router puts ``"kv_transfer_params": {"deeplink": {"side": …, "ticket": …}}`` into the body, for every engine
alike. SGLang carries only fields that it knows, of which two are there for disaggregation: the host and the room of a
request. So on its way in, the body's ticket is moved into these; what a client has put there itself is lost with it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from deeplink.errors import TicketRefused

FIELD = "kv_transfer_params"
PREFIX = "deeplink-"
PATHS = frozenset({"/generate", "/v1/completions", "/v1/chat/completions"})
MAX_BODY = 64 << 20

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class Passage:
    """ASGI middleware. Bodies that are larger than MAX_BODY, or hold no ticket, pass as they are."""

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in PATHS:
            await self._app(scope, receive, send)
            return
        messages: list[Message] = []
        body, more = b"", True
        while more and len(body) <= MAX_BODY:
            messages.append(await receive())
            body += messages[-1].get("body", b"")
            more = messages[-1]["type"] == "http.request" and messages[-1].get("more_body", False)
        if not more and messages[-1]["type"] == "http.request" and (changed := rewrite(body)) is not None:
            messages = [{"type": "http.request", "body": changed, "more_body": False}]
            scope = {**scope, "headers": _resized(scope["headers"], len(changed))}
        waiting = iter(messages)

        async def replay() -> Message:
            if (message := next(waiting, None)) is not None:
                return message
            return await receive()

        await self._app(scope, replay, send)


def rewrite(body: bytes) -> bytes | None:
    """The body with its ticket where SGLang carries it; None if it has none, or is not a JSON object."""
    if FIELD.encode() not in body:
        return None
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or not isinstance(given := fields.pop(FIELD, None), dict):
        return None
    given = given.get("deeplink")
    if not isinstance(given, dict):
        return None
    side, ticket = given.get("side"), given.get("ticket")
    if not isinstance(side, str) or not isinstance(ticket, str):
        return None
    # Any room but none makes SGLang take the request for one of a pair; the scheduler sets the ticket's.
    fields |= {"bootstrap_host": f"{PREFIX}{side}-{ticket}", "bootstrap_port": None, "bootstrap_room": 1}
    return json.dumps(fields).encode()


def read(host: str | None, side: str) -> str | None:
    """The ticket's text that `rewrite` has put into a request's host; None if that is a host. Raises TicketRefused for
    one that is meant for the other side."""
    if not host or not host.startswith(PREFIX):
        return None
    meant, _, text = host.removeprefix(PREFIX).partition("-")
    if meant != side:
        raise TicketRefused(
            f"the ticket is to {meant}, and this engine is there to {side}", field="side", ours=side, theirs=meant
        )
    return text


def room(handoff: str) -> int:
    """A number for SGLang to tell requests apart by, which is never 0."""
    return int.from_bytes(hashlib.blake2b(handoff.encode(), digest_size=7).digest(), "little") | 1


def _resized(headers: list[tuple[bytes, bytes]], length: int) -> list[tuple[bytes, bytes]]:
    return [(name, str(length).encode() if name == b"content-length" else value) for name, value in headers]
