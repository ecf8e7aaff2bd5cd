"""What an OpenAI endpoint says of a completion: the whole of it, or one event of a stream. Read with types, for whoever
answers may be no engine at all."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from deeplink.errors import LocalError


class Piece(msgspec.Struct, frozen=True):
    text: str | None = None
    content: str | None = None


class Choice(msgspec.Struct, frozen=True):
    """A completion has its text itself, a chat completion in a delta of a stream or in a message."""

    text: str | None = None
    token_ids: list[int] | None = None
    delta: Piece | None = None
    message: Piece | None = None

    @property
    def said(self) -> str:
        piece = self.delta or self.message or Piece()
        return self.text or piece.text or piece.content or ""


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int | None = None


class Event(msgspec.Struct, frozen=True):
    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None


def read(data: bytes, where: str) -> Event:
    """Raises LocalError for what is no completion, and for an error in its place; `where` is who sent it."""
    try:
        event = msgspec.json.decode(data, type=Event)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise LocalError(
            f"{where} answered with what is no completion: {exc}",
            field="body",
            ours="an event of OpenAI's API",
            theirs=data[:200].decode(errors="replace"),
            remedy="name the endpoint of an engine that serves OpenAI's API",
        ) from exc
    if event.error is not None:
        raise LocalError(f"{where} failed while it answered: {json.dumps(event.error)[:2000]}")
    return event
