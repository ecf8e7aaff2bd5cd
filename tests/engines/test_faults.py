"""An engine or the client goes away. The client hears why; what was held is free; a restarted engine serves again."""

from __future__ import annotations

import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
from fleet import Pair, completion, events, http, prompt, quiet, token_ids


def _begin(url: str, body: object) -> http.client.HTTPConnection:  # type: ignore[name-defined]
    """A request that was sent; the caller closes the connection to go away."""
    from http.client import HTTPConnection

    connection = HTTPConnection(urlsplit(url).netloc, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    return connection


@pytest.mark.parametrize("seconds", [0.05, 0.4, 0.9])
def test_client_gone_during_prefill(pair: Pair, seconds: float) -> None:
    connection = _begin(pair.router, completion(prompt(900, seed=int(seconds * 1000))))
    time.sleep(seconds)
    connection.close()
    quiet(pair.prefill, pair.decode)


def test_client_gone_during_decode(pair: Pair) -> None:
    stream = events(pair.router + "/v1/completions", completion(prompt(100, seed=61), 500, stream=True))
    for _ in range(5):
        next(stream)
    stream.close()
    quiet(pair.prefill, pair.decode)


def test_prefill_engine_killed_mid_prefill(pair: Pair) -> None:
    body = completion(prompt(900, seed=71))
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(http, pair.router + "/v1/completions", body)
        time.sleep(0.5)
        assert not future.done()
        pair.prefill.kill()
        killed = time.monotonic()
        answer = future.result(30)
    assert time.monotonic() - killed < 5
    assert answer.status == 502, answer.data
    assert answer.error["code"] == "prefill_failed"
    assert "prefill" in answer.error["message"]
    quiet(pair.decode)
    answer = http(pair.router + "/v1/completions", body)
    assert answer.error["code"] in ("no_engine", "prefill_failed")  # before or after the router has noticed

    pair.fleet.restart(pair.prefill)
    answer = http(pair.router + "/v1/completions", body)
    assert answer.status == 200, answer.data
    assert answer.headers["x-deeplink-path"] == "handoff"
    assert token_ids(answer.json) == token_ids(pair.decode.alone(body))
    quiet(pair.prefill, pair.decode)


def test_decode_engine_killed_mid_decode(pair: Pair) -> None:
    stream = events(pair.router + "/v1/completions", completion(prompt(100, seed=81), 800, stream=True))
    for _ in range(5):
        assert "error" not in json.loads(next(stream))
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(http, pair.router + "/v1/completions", completion(prompt(100, seed=82), 800))
        time.sleep(1.0)
        pair.decode.kill()
        killed = time.monotonic()
        *_, last = stream
        assert json.loads(last)["error"]["code"] == "decode_failed"
        answer = whole.result(30)
    assert time.monotonic() - killed < 5
    assert answer.status == 502, answer.data
    assert answer.error["code"] == "decode_failed"
    quiet(pair.prefill)

    pair.fleet.restart(pair.decode)
    body = completion(prompt(100, seed=83))
    answer = http(pair.router + "/v1/completions", body)
    assert answer.status == 200, answer.data
    assert answer.headers["x-deeplink-path"] == "handoff"
    assert token_ids(answer.json) == token_ids(pair.decode.alone(body))
    quiet(pair.prefill, pair.decode)
