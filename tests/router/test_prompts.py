"""What a prompt is looked up by, and what is too long for that."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from deeplink.router import prompts
from deeplink.router.body import Body
from deeplink.router.exchange import MAX_SESSION, Exchange, Outgoing
from deeplink.router.kv_index import chain
from deeplink.router.names import Names
from deeplink.router.prompts import Prompts


class Nobody:
    """Who is asked for nothing."""

    async def get(self, url: str, limit: int = 0) -> tuple[int, bytes]:
        raise AssertionError

    async def post(self, url: str, body: bytes, limit: int = 0, seconds: float = 0) -> tuple[int, bytes]:
        raise AssertionError


def chains(fields: dict[str, Any]) -> Any:
    return asyncio.run(Prompts(Nobody()).chains(Body(b"", fields), None, {1, 4}))


def test_a_prompt_of_tokens_is_looked_up_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to a length: one number for each token would keep the loop, and workers say them to another process."""
    monkeypatch.setattr(prompts, "MAX_TOKENS", 8)
    tokens = list(range(8))
    assert chains({"prompt": tokens}) == {1: chain(tokens, 1), 4: chain(tokens, 4)}
    assert chains({"prompt": [*tokens, 8]}) is None
    assert chains({"prompt": []}) is None


@pytest.mark.parametrize("long", ["s" * 10_000, "\ud800" * 10_000])
def test_a_session_is_no_longer_than_it_need_be(long: str) -> None:
    header = Names({"x-session-id": True}, False)
    path = "/v1/completions"
    one = Exchange(Outgoing("POST", path, path, [], True, header), Body(b"", {"user": long}), 0.0)
    assert one.session == long[:MAX_SESSION]
    pairs = [(b"X-Session-Id", long.encode("utf-8", "surrogatepass"))]
    other = Exchange(Outgoing("POST", path, path, pairs, True, header), Body(b"", {"user": "u"}), 0.0)
    assert len(other.session) == MAX_SESSION
