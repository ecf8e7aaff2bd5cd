"""A small client of the OpenAI endpoint and of the control endpoint: blocking, one request at a time."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from deeplink import bounded
from deeplink.errors import LocalError
from deeplink.local import completion
from deeplink.local.unreached import unreached

SILENT_SECONDS = 180.0
"""How long an answer may stand still."""
ASK_SECONDS = 900.0
GET_SECONDS = 10.0
MAX_GET = 16 << 20
MAX_LINE = 1 << 20
MAX_ANSWER = 64 << 20
"""Bytes of one event, and of an answer that is not streamed."""
_REMEDIES = {
    401: "give the key or the secret that it asks for",
    403: "give the key or the secret that it asks for",
    404: "name the endpoint of an engine, without a path such as /v1",
}


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
    begin = time.monotonic()
    with _connection(url, where, SILENT_SECONDS, ASK_SECONDS) as connection:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        with connection.getresponse() as response:
            if response.status != 200:
                said = response.read(4000).decode(errors="replace")
                raise LocalError(f"{where} answered {response.status}: {said}")
            answer = Answer({name.lower(): value for name, value in response.getheaders()})
            events = _events(response, where) if body.get("stream") else iter([_whole(response, MAX_ANSWER, where)])
            for event in events:
                _add(answer, completion.read(event, where), begin, on_text)
    return answer


def get(url: str, token: str = "", accept: str = "application/json", limit: int = MAX_GET) -> bytes:
    """GET `url`. Raises LocalError for any status but 200, for an endpoint that cannot be reached, and for an answer of
    more than `limit` bytes.
    """
    headers = {"Accept": accept} | ({"Authorization": f"Bearer {token}"} if token else {})
    with _connection(url, url, GET_SECONDS, GET_SECONDS) as connection:
        connection.request("GET", urlsplit(url).path, headers=headers)
        with connection.getresponse() as response:
            status, content = response.status, _whole(response, limit, url)
    if status != 200:
        said = content[:500].decode(errors="replace")
        raise LocalError(f"{url} answered {status}: {said}", remedy=_REMEDIES.get(status, ""))
    return content


def get_json(url: str, token: str = "") -> dict[str, Any]:
    try:
        value = json.loads(get(url, token))
    except (ValueError, RecursionError) as exc:
        raise LocalError(f"{url} did not answer with JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise LocalError(f"{url} did not answer with a JSON object")
    return value


@contextlib.contextmanager
def _connection(url: str, where: str, silent: float, seconds: float) -> Iterator[http.client.HTTPConnection]:
    """A connection that is cut after `seconds`: whoever sends a byte now and then would outlast any timeout of a read.
    Raises LocalError for whatever goes wrong with it inside the block; `where` is how it is called then."""
    begin = time.monotonic()
    try:
        parts = urlsplit(url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        with contextlib.closing(kind(parts.hostname or "", parts.port, timeout=min(silent, seconds))) as connection:
            connection.connect()
            cut = threading.Timer(max(begin + seconds - time.monotonic(), 0.0), _cut, [connection.sock])
            cut.daemon = True
            cut.start()
            try:
                yield connection
            finally:
                cut.cancel()
            if time.monotonic() - begin >= seconds:  # what was read may end where it was cut
                raise TimeoutError
    except (OSError, http.client.HTTPException, ValueError) as exc:  # ValueError: what is no port or no host name
        passed = time.monotonic() - begin
        raise unreached(where, exc if passed < seconds else TimeoutError(), min(passed, seconds)) from exc


def _cut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended by itself
        sock.shutdown(socket.SHUT_RDWR)


def _whole(response: http.client.HTTPResponse, limit: int, where: str) -> bytes:
    content = bounded.read(response, limit, math.inf)  # the connection is cut when it is time
    if len(content) > limit:
        raise LocalError(f"{where} answered with more than {limit} bytes")
    return content


def _events(response: http.client.HTTPResponse, where: str) -> Iterator[bytes]:
    """The data of each server-sent event, up to [DONE]; a stream that ends without it was cut off."""
    while line := response.readline(MAX_LINE + 1):
        if len(line) > MAX_LINE:
            raise LocalError(f"{where} sent an event of more than {MAX_LINE} bytes")
        name, _, data = line.strip().partition(b":")
        if name != b"data":
            continue
        if data.strip() == b"[DONE]":
            return
        yield data
    raise http.client.IncompleteRead(b"", None)


def _add(answer: Answer, event: completion.Event, begin: float, on_text: Callable[[str], None]) -> None:
    for choice in event.choices or ():
        text, token_ids = choice.said, choice.token_ids or ()
        if (text or token_ids) and not answer.ttft_ms:
            answer.ttft_ms = (time.monotonic() - begin) * 1e3
        answer.token_ids += token_ids
        answer.text += text
        if text:
            on_text(text)
    if event.usage is not None:
        answer.prompt_tokens = event.usage.prompt_tokens
        answer.completion_tokens = event.usage.completion_tokens or 0
