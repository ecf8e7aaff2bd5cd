"""Several streamed completions at once, and when each of their tokens came."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from deeplink.errors import LocalError

MAX_LINE = 1 << 20
"""Bytes of one event; an engine that sends more is not believed."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Seconds of time.monotonic: when the request was sent, and when each token came. Names of `headers` are in lower
    case."""

    sent: float
    tokens: tuple[float, ...]
    headers: Mapping[str, str]


def body(model: str, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    """A request for exactly so many tokens. `return_token_ids` is vLLM's, and others ignore it."""
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "min_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
    }


def together(url: str, bodies: Sequence[Mapping[str, Any]], *, key: str = "", seconds: float = 300.0) -> list[Stream]:
    """Sends all at once, and waits for all. Raises LocalError for an endpoint that cannot be reached, any status but
    200, an error inside a stream, a stream that is cut off, and when it takes longer than `seconds` in all."""
    return asyncio.run(_together(url, bodies, key, seconds))


async def _together(url: str, bodies: Sequence[Mapping[str, Any]], key: str, seconds: float) -> list[Stream]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=seconds)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:
        calls = [asyncio.create_task(_one(session, url, one)) for one in bodies]
        try:
            return list(await asyncio.gather(*calls))
        except asyncio.TimeoutError as exc:
            raise LocalError(f"{url} did not answer {len(bodies)} requests within {seconds:g} s") from exc
        except (aiohttp.ClientError, OSError, ValueError) as exc:
            raise LocalError(f"{url}: {exc!r}") from exc
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)


async def _one(session: aiohttp.ClientSession, url: str, given: Mapping[str, Any]) -> Stream:
    sent = time.monotonic()
    tokens: list[float] = []
    async with session.post(f"{url}/v1/completions", json=given) as response:
        if response.status != 200:
            said = (await response.content.read(2000)).decode(errors="replace")
            raise LocalError(f"{url} answered {response.status}: {said}")
        done = False
        while line := await response.content.readline():
            if len(line) > MAX_LINE:
                raise LocalError(f"{url} sent an event of {len(line)} bytes")
            if not line.startswith(b"data:"):
                continue
            now, data = time.monotonic(), line[5:].strip()
            if data == b"[DONE]":
                done = True
                break
            tokens += [now] * _count(json.loads(data), url)
        headers = {name.lower(): value for name, value in response.headers.items()}
    if not done or not tokens:
        raise LocalError(f"{url} ended a stream after {len(tokens)} tokens")
    return Stream(sent, tuple(tokens), headers)


def _count(event: Any, url: str) -> int:
    """How many tokens an event has. One, where the engine does not say."""
    if not isinstance(event, dict) or "error" in event:
        raise LocalError(f"{url} failed while it answered: {json.dumps(event)[:2000]}")
    found = 0
    for choice in event.get("choices") or ():
        ids = choice.get("token_ids")
        found += len(ids) if isinstance(ids, list) else int(bool(choice.get("text")))
    return found
