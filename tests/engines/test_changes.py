"""Other weights are loaded into an engine that runs, and its contract is then no longer true."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.error import URLError

import pytest
from fleet import Fleet, Running, completion, exact, http, prompt, quiet, ticketed, token_ids

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def engines(fleet: Fleet) -> Iterator[tuple[Running, Running]]:
    more: dict[str, Any] = {
        "model": fleet.tiny("four-heads"),
        "kv_mib": 64,
        "env": {"VLLM_SERVER_DEV_MODE": "1"},
    }
    one = fleet.prepare("changing", "both", block_size=64, **more)
    other = fleet.prepare("as-it-was", "both", block_size=128, **more)
    with fleet.running(one, other):
        yield one, other


def call(running: Running, method: str, **more: str) -> None:
    """One of its workers' methods, by the name that vLLM takes."""
    answer = http(running.url + "/collective_rpc", {"method": method, "kwargs": more})
    assert answer.status == 200, answer.data


def test_a_call_that_leaves_them_as_they_are(engines: tuple[Running, Running]) -> None:
    call(engines[0], "check_health")
    exact(*engines, tokens=200, seed=1)


def test_nothing_is_handed_over_once_they_are_others(fleet: Fleet, engines: tuple[Running, Running]) -> None:
    """The last one here, for there is no way back but to start it again."""
    one, other = engines
    body = completion(prompt(200, seed=2), 8)
    before = token_ids(one.alone(body))
    assert before == token_ids(other.alone(body))
    ways = [(one, other, *ticketed(one, other, seconds=8)), (other, one, *ticketed(other, one, seconds=8))]
    call(one, "reload_weights", weights_path=str(fleet.tiny("other-weights")))
    assert token_ids(one.alone(body)) != before, "what it would hand over is of other weights"
    for prefill, decode, _, ticket in ways:
        for running, side, status in ((prefill, "produce", 200), (decode, "consume", 500)):
            parameters = {"kv_transfer_params": {"deeplink": {"side": side, "ticket": ticket}}}
            answer = http(running.url + "/v1/completions", {**body, **parameters})
            assert answer.status == status, answer.data
    assert other.handoff(ways[0][2])["reason"]["field"] == "model.weights"
    quiet(other, seconds=10)  # nobody cancels what it offered, as a router would
    with pytest.raises(URLError):
        _ = one.contract
    told = one.process.log.read_text()
    assert told.count("deeplink hands nothing over any more") == 1
    assert "field model.weights: ours after a call of reload_weights" in told
    assert token_ids(one.alone(body)) != before
