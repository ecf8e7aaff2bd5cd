"""Errors in the shape that OpenAI clients read. Pure."""

from __future__ import annotations

import json
from typing import Any

from deeplink.errors import DeeplinkError


def error(status: int, code: str, message: str, **more: str) -> bytes:
    """The body of an error answer. `more` goes beside OpenAI's own members; empty ones are left out."""
    inner: dict[str, Any] = {
        "message": message,
        "type": "invalid_request_error" if status < 500 else "server_error",
        "param": None,
        "code": code,
    }
    inner |= {name: value for name, value in more.items() if value}
    return json.dumps({"error": inner}).encode()


def body(failure: DeeplinkError) -> bytes:
    """`failure` as a body: OpenAI's members, and the field, both values and the remedy to be read by
    programs."""
    return error(
        failure.status,
        failure.code,
        str(failure),
        field=failure.field,
        ours=failure.ours,
        theirs=failure.theirs,
        remedy=failure.remedy,
    )


def event(failure: DeeplinkError) -> bytes:
    """`failure` as the last event of a stream. No ``[DONE]`` follows: the answer is not complete."""
    return b"data: " + body(failure) + b"\n\n"
