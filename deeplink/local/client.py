"""A small client of the OpenAI endpoint and of the control endpoint: blocking, one request at a time."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from deeplink.errors import LocalError

TIMEOUT_SECONDS = 180.0
GET_SECONDS = 10.0
MAX_GET = 16 << 20


@dataclass(slots=True)
class Answer:
    """One answer. `ttft_ms` runs from sending the request to the arrival of the first token, which for an
    answer that is not streamed comes with all the others.
    """

    headers: Mapping[str, str]
    prompt_tokens: int = 0
    completion_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    ttft_ms: float = 0.0


def ask(url: str, path: str, body: Mapping[str, Any], on_text: Callable[[str], None] = lambda _: None) -> Answer:
    """POST a completion or chat completion; `on_text` sees each piece of a streamed answer as it arrives.

    Token ids are in the answer when the body asks for them (`return_token_ids`). Raises LocalError for any
    status but 200, for an error inside a stream, for an endpoint that cannot be reached or does not finish.
    """
    where = f"{url}{path}"
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_SECONDS)
    begin = time.monotonic()
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        with connection.getresponse() as response:
            if response.status != 200:
                said = response.read(4000).decode(errors="replace")
                raise LocalError(f"{where} answered {response.status}: {said}")
            answer = Answer({name.lower(): value for name, value in response.getheaders()})
            events = _events(response) if body.get("stream") else iter([response.read()])
            for event in events:
                _add(answer, json.loads(event), begin, on_text, where)
    except (OSError, http.client.HTTPException, ValueError) as exc:
        raise LocalError(f"{where}: {exc!r}") from exc
    finally:
        connection.close()
    return answer


def get(url: str, token: str = "", accept: str = "application/json", limit: int = MAX_GET) -> bytes:
    """GET `url`. Raises LocalError for any status but 200, for an endpoint that cannot be reached, and for an answer of
    more than `limit` bytes.
    """
    deadline = time.monotonic() + GET_SECONDS
    headers = {"Accept": accept} | ({"Authorization": f"Bearer {token}"} if token else {})
    try:
        parts = urlsplit(url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        with contextlib.closing(kind(parts.hostname or "", parts.port, timeout=GET_SECONDS)) as connection:
            connection.request("GET", parts.path, headers=headers)
            with connection.getresponse() as response:
                status, content = response.status, b""
                while len(content) <= limit and (piece := response.read1(limit + 1 - len(content))):
                    content += piece
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"not all of it came within {GET_SECONDS} seconds")
    except (OSError, http.client.HTTPException, ValueError) as exc:  # ValueError: what is no port or no host name
        raise LocalError(f"{url}: {exc!r}") from exc
    if len(content) > limit:
        raise LocalError(f"{url} answered with more than {limit} bytes")
    if status != 200:
        raise LocalError(f"{url} answered {status}: {content[:500].decode(errors='replace')}")
    return content


def get_json(url: str, token: str = "") -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(get(url, token))
    except ValueError as exc:
        raise LocalError(f"{url} did not answer with JSON: {exc}") from exc
    return value


def _events(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """The data of each server-sent event, up to [DONE]; a stream that ends without it was cut off."""
    for line in response:
        name, _, data = line.strip().partition(b":")
        if name != b"data":
            continue
        if data.strip() == b"[DONE]":
            return
        yield data
    raise http.client.IncompleteRead(b"", None)


def _add(answer: Answer, event: dict[str, Any], begin: float, on_text: Callable[[str], None], where: str) -> None:
    if "error" in event:
        raise LocalError(f"{where} failed while it answered: {json.dumps(event['error'])[:2000]}")
    for choice in event.get("choices", ()):
        said = choice.get("delta") or choice.get("message") or choice
        text = said.get("text") or said.get("content") or ""
        token_ids = choice.get("token_ids") or ()
        if (text or token_ids) and not answer.ttft_ms:
            answer.ttft_ms = (time.monotonic() - begin) * 1e3
        answer.token_ids += token_ids
        answer.text += text
        if text:
            on_text(text)
    if event.get("usage"):
        answer.prompt_tokens = event["usage"]["prompt_tokens"]
        answer.completion_tokens = event["usage"].get("completion_tokens", 0)
