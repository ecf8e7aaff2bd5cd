"""How a ticket gets from the body of a request past an engine's HTTP server, which knows nothing of it.

deeplink's router puts ``"kv_transfer_params": {"deeplink": {"side": …, "ticket": …}}`` into the body, for every engine
alike. An engine whose server carries only fields of its own has the ticket moved into one of those on the way in.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

FIELD = "kv_transfer_params"
MAX_BODY = 64 << 20

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class Passage:
    """ASGI middleware: bodies of POST requests to `paths` are what `rewrite` makes of them, or pass as they are where
    that is None. So do those that are larger than MAX_BODY."""

    def __init__(self, app: Application, paths: Collection[str], rewrite: Callable[[bytes], bytes | None]) -> None:
        self._app = app
        self._paths = paths
        self._rewrite = rewrite

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        messages: list[Message] = []
        body, more = bytearray(), True  # bytes would be copied anew with every message
        while more and len(body) <= MAX_BODY:
            messages.append(await receive())
            body += messages[-1].get("body", b"")
            more = messages[-1]["type"] == "http.request" and messages[-1].get("more_body", False)
        if not more and messages[-1]["type"] == "http.request" and (changed := self._rewrite(bytes(body))) is not None:
            messages = [{"type": "http.request", "body": changed, "more_body": False}]
            scope = {**scope, "headers": _resized(scope["headers"], len(changed))}
        waiting = iter(messages)

        async def replay() -> Message:
            if (message := next(waiting, None)) is not None:
                return message
            return await receive()

        await self._app(scope, replay, send)


def taken(body: bytes) -> tuple[dict[str, Any], str, str] | None:
    """The body's fields without the ticket, the side it is for, and the ticket; None if there is none, or the body is
    not a JSON object."""
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
    return fields, side, ticket


def _resized(headers: list[tuple[bytes, bytes]], length: int) -> list[tuple[bytes, bytes]]:
    return [(name, str(length).encode() if name == b"content-length" else value) for name, value in headers]
