"""The token ids of prompts, from an engine that tokenises them as it would to serve them. Cached.

Only an engine knows its chat template, and tokenising a long prompt takes tens of milliseconds: it is done there, while
other requests go on here. What cannot be had in TOKENIZE_SECONDS is not waited for.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections import OrderedDict
from typing import Annotated

import msgspec
import xxhash

from deeplink.errors import DeeplinkError
from deeplink.router import kv_index
from deeplink.router.body import Body
from deeplink.router.engine import Engine
from deeplink.router.kinds import Probe

TOKENIZE_SECONDS = 0.5
MAX_ANSWER = 16 << 20
MAX_TOKENS = 1 << 20
ROOM = 1 << 22
"""Tokens of prompts that are kept, all together."""
_TOLD = (
    "model",
    "prompt",
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "mm_processor_kwargs",
)

Chains = dict[int, tuple[int, ...]]


class Prompts:
    """The chains (`kv_index.chain`) of prompts, by block size."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._kept: OrderedDict[bytes, array[int]] = OrderedDict()
        self._chains: dict[bytes, Chains] = {}
        self._asked: dict[bytes, asyncio.Task[array[int] | None]] = {}
        self._tokens = 0

    async def chains(self, body: Body, engine: Engine | None, sizes: set[int]) -> Chains | None:
        """None if the prompt's tokens are not known in time; `engine` is who may be asked."""
        prompt = body.fields.get("prompt")
        if "cache_salt" in body.fields:
            return None  # tokens alone do not say which blocks it shares
        if isinstance(prompt, list):
            if not 0 < len(prompt) <= MAX_TOKENS or not all(
                type(item) is int and 0 <= item < 1 << 32 for item in prompt
            ):
                return None
            return {size: kv_index.chain(prompt, size) for size in sizes}
        asked = {name: body.fields[name] for name in _TOLD if name in body.fields}
        data = json.dumps(asked, separators=(",", ":")).encode(errors="surrogatepass")
        key = xxhash.xxh3_128_digest(data)
        tokens = self._kept.get(key)
        if tokens is None:
            tokens = await self._ask(key, data, engine)
            if tokens is None:
                return None
        else:
            self._kept.move_to_end(key)
        mine = self._chains.setdefault(key, {})
        for size in sizes - mine.keys():
            mine[size] = kv_index.chain(tokens, size)
        return {size: mine[size] for size in sizes}

    async def _ask(self, key: bytes, data: bytes, engine: Engine | None) -> array[int] | None:
        task = self._asked.get(key)
        if task is None:
            if engine is None:
                return None
            task = self._asked[key] = asyncio.create_task(self._tokenised(engine, data))
            task.add_done_callback(lambda task: self._answered(key, task))
        try:
            return await asyncio.wait_for(asyncio.shield(task), TOKENIZE_SECONDS)
        except asyncio.TimeoutError:
            return None

    async def _tokenised(self, engine: Engine, data: bytes) -> array[int] | None:
        try:
            status, answer = await self._probe.post(f"{engine.url}/tokenize", data, MAX_ANSWER)
        except DeeplinkError:
            return None
        if status != 200 or len(answer) > MAX_ANSWER:
            return None
        return tokens_of(answer)

    def _answered(self, key: bytes, task: asyncio.Task[array[int] | None]) -> None:
        self._asked.pop(key, None)
        tokens = None if task.cancelled() else task.result()
        if tokens is None:
            return
        self._kept[key] = tokens
        self._tokens += len(tokens)
        while self._tokens > ROOM and len(self._kept) > 1:
            old, gone = self._kept.popitem(last=False)
            self._chains.pop(old, None)
            self._tokens -= len(gone)


class _Tokens(msgspec.Struct):
    tokens: Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]], msgspec.Meta(max_length=MAX_TOKENS)]


_answer = msgspec.json.Decoder(_Tokens)


def tokens_of(answer: bytes) -> array[int] | None:
    """The ids in an engine's answer to /tokenize; None if it has none."""
    try:
        return array("I", _answer.decode(answer).tokens)
    except (msgspec.DecodeError, RecursionError):
        return None
