"""How a ticket gets from the body of a request past an engine's HTTP server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.kvconnector.passage import Passage, Receive, Send, taken

TICKET = "abc_DEF-123=="
BODY = {"prompt": "x", "kv_transfer_params": {"deeplink": {"side": "consume", "ticket": TICKET}}}


def rewrite(body: bytes) -> bytes | None:
    found = taken(body)
    return None if found is None else json.dumps([*found]).encode()


def test_the_ticket_is_taken_out_of_the_body() -> None:
    assert taken(json.dumps(BODY).encode()) == ({"prompt": "x"}, "consume", TICKET)


@given(st.binary(max_size=64) | st.binary(max_size=32).map(lambda junk: b'{"kv_transfer_params":' + junk))
def test_a_body_without_one(body: bytes) -> None:
    assert taken(body) is None


@pytest.mark.parametrize(
    "given", [None, 1, [], {}, {"deeplink": 1}, {"deeplink": {"side": 1, "ticket": "x"}}, {"deeplink": {"side": "x"}}]
)
def test_nor_is_there_one_that_is_malformed(given: object) -> None:
    assert taken(json.dumps({"kv_transfer_params": given}).encode()) is None


def test_a_body_that_is_nested_too_deep() -> None:
    assert taken(b'{"kv_transfer_params":' + b"[" * 100_000) is None


async def _call(path: str, pieces: list[bytes]) -> tuple[MutableMapping[str, Any], list[MutableMapping[str, Any]]]:
    """What the application behind the middleware is called with."""
    seen: dict[str, Any] = {}

    async def app(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        seen["scope"], seen["messages"] = scope, [await receive()]
        while seen["messages"][-1].get("more_body"):
            seen["messages"].append(await receive())
        seen["messages"].append(await receive())

    waiting = [
        {"type": "http.request", "body": piece, "more_body": index < len(pieces) - 1}
        for index, piece in enumerate(pieces)
    ] + [{"type": "http.disconnect"}]

    async def receive() -> MutableMapping[str, Any]:
        return waiting.pop(0)

    async def send(message: MutableMapping[str, Any]) -> None:
        raise AssertionError(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": [(b"content-length", b"7"), (b"x", b"y")]}
    await Passage(app, {"/v1/completions"}, rewrite)(scope, receive, send)
    return seen["scope"], seen["messages"]


def test_a_body_in_pieces_is_rewritten_as_a_whole() -> None:
    raw = json.dumps(BODY).encode()
    scope, messages = asyncio.run(_call("/v1/completions", [raw[:10], raw[10:30], raw[30:]]))
    assert [message["type"] for message in messages] == ["http.request", "http.disconnect"]
    assert messages[0]["body"] == rewrite(raw)
    assert scope["headers"] == [(b"content-length", str(len(messages[0]["body"])).encode()), (b"x", b"y")]


@pytest.mark.parametrize(("path", "raw"), [("/v1/completions", b'{"a": 1}'), ("/other", json.dumps(BODY).encode())])
def test_other_bodies_and_paths_pass_as_they_are(path: str, raw: bytes) -> None:
    scope, messages = asyncio.run(_call(path, [raw[:3], raw[3:]]))
    assert [message.get("body") for message in messages] == [raw[:3], raw[3:], None]
    assert scope["headers"][0] == (b"content-length", b"7")
