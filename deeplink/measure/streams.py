"""Several streamed completions at once, and when each of their tokens came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import http

from deeplink.errors import LocalError
from deeplink.local import completion
from deeplink.local.unreached import unreached

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
    # aiohttp takes lines of twice its buffer.
    async with aiohttp.ClientSession(
        headers=headers, timeout=timeout, connector=connector, read_bufsize=MAX_LINE // 2
    ) as session:
        calls = [asyncio.create_task(_one(session, url, one)) for one in bodies]
        try:
            return list(await asyncio.gather(*calls))
        except asyncio.TimeoutError as exc:
            raise LocalError(
                f"{url} did not answer {len(bodies)} request{'s' if len(bodies) > 1 else ''} within {seconds:g} s",
                remedy="allow more with --seconds, or ask for less at a time",
            ) from exc
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError) as exc:
            raise unreached(url, ConnectionResetError(str(exc)), seconds) from exc
        except (aiohttp.ClientError, http.HttpProcessingError, OSError, ValueError) as exc:
            raise unreached(url, exc, seconds) from exc
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
            status = response.status
            raise LocalError(f"{url}/v1/completions answered {status}: {said}", remedy=_remedy(status))
        done = False
        while line := await _line(response, url):
            if not line.startswith(b"data:"):
                continue
            now, data = time.monotonic(), line[5:].strip()
            if data == b"[DONE]":
                done = True
                break
            tokens += [now] * _count(completion.read(data, url))
        headers = {name.lower(): value for name, value in response.headers.items()}
    if not done or not tokens:
        raise LocalError(
            f"{url} ended a stream after {len(tokens)} tokens",
            remedy="its log says why; a server that does not stream completions cannot be measured",
        )
    return Stream(sent, tuple(tokens), headers)


async def _line(response: aiohttp.ClientResponse, url: str) -> bytes:
    try:
        return await response.content.readline()
    except (ValueError, http.HttpProcessingError) as exc:  # the first up to aiohttp 3.13
        raise LocalError(
            f"{url} sent an event of more than {MAX_LINE} bytes", remedy="name the endpoint of an engine"
        ) from exc


def _remedy(status: int) -> str:
    if status in (401, 403):
        return "give the endpoint's key with --key-file"
    return "measure an engine that takes prompts of token ids, as vLLM and SGLang do"


def _count(event: completion.Event) -> int:
    """How many tokens an event has. One, where the engine does not say."""
    found = 0
    for choice in event.choices or ():
        found += int(bool(choice.said)) if choice.token_ids is None else len(choice.token_ids)
    return found
