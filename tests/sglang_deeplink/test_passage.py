"""How a ticket comes from a request's body to SGLang's scheduler."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.errors import TicketRefused
from sglang_deeplink import passage

TICKET = "abc_DEF-123=="
BODY = {"prompt": "x", "kv_transfer_params": {"deeplink": {"side": "consume", "ticket": TICKET}}}


def test_a_ticket_is_moved_to_where_sglang_carries_it() -> None:
    body = {**BODY, "bootstrap_host": "elsewhere", "bootstrap_port": 1}
    changed = passage.rewrite(json.dumps(body).encode())
    assert changed is not None
    fields = json.loads(changed)
    assert "kv_transfer_params" not in fields
    assert fields["prompt"] == "x"
    assert fields["bootstrap_port"] is None
    assert passage.read(fields["bootstrap_host"], "consume") == TICKET
    with pytest.raises(TicketRefused):
        passage.read(fields["bootstrap_host"], "produce")


@pytest.mark.parametrize("host", [None, "", "127.0.0.1", "deeplink.example"])
def test_a_host_is_no_ticket(host: str | None) -> None:
    assert passage.read(host, "consume") is None


@given(st.binary(max_size=64) | st.binary(max_size=32).map(lambda junk: b'{"kv_transfer_params":' + junk))
def test_what_is_no_body_with_a_ticket_passes_as_it_is(body: bytes) -> None:
    assert passage.rewrite(body) is None


@pytest.mark.parametrize(
    "given", [None, 1, [], {}, {"deeplink": 1}, {"deeplink": {"side": 1, "ticket": "x"}}, {"deeplink": {"side": "x"}}]
)
def test_nor_does_one_that_is_malformed(given: object) -> None:
    assert passage.rewrite(json.dumps({"kv_transfer_params": given}).encode()) is None


def test_rooms_tell_handoffs_apart_and_are_never_none() -> None:
    rooms = {passage.room(f"{index:024x}") for index in range(1000)}
    assert len(rooms) == 1000
    assert all(0 < room < 1 << 60 for room in rooms)


async def _call(path: str, pieces: list[bytes]) -> tuple[MutableMapping[str, Any], list[MutableMapping[str, Any]]]:
    """What the application behind the middleware is called with."""
    seen: dict[str, Any] = {}

    async def app(scope: MutableMapping[str, Any], receive: passage.Receive, send: passage.Send) -> None:
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
    await passage.Passage(app)(scope, receive, send)
    return seen["scope"], seen["messages"]


def test_a_body_in_pieces_is_rewritten_as_a_whole() -> None:
    raw = json.dumps(BODY).encode()
    scope, messages = asyncio.run(_call("/v1/completions", [raw[:10], raw[10:30], raw[30:]]))
    assert [message["type"] for message in messages] == ["http.request", "http.disconnect"]
    assert messages[0]["body"] == passage.rewrite(raw)
    assert scope["headers"] == [(b"content-length", str(len(messages[0]["body"])).encode()), (b"x", b"y")]


@pytest.mark.parametrize(("path", "raw"), [("/v1/completions", b'{"a": 1}'), ("/other", json.dumps(BODY).encode())])
def test_other_bodies_and_paths_pass_as_they_are(path: str, raw: bytes) -> None:
    scope, messages = asyncio.run(_call(path, [raw[:3], raw[3:]]))
    assert [message.get("body") for message in messages] == [raw[:3], raw[3:], None]
    assert scope["headers"][0] == (b"content-length", b"7")
