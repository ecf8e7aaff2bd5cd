"""vLLM's OffloadingConnector beside deeplink's, on engines of few blocks: what one needs is soon only offloaded."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from fleet import Fleet, Running, completion, hand_over, http, prompt, quiet, token_ids

from deeplink.config import control_port
from deeplink.local import engines

pytestmark = pytest.mark.long

OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "HostSpec",
        "spec_module_path": "deeplink_testing_offload",
        "cpu_bytes_to_use": 64 << 20,
    },
}
FEW = ("--num-gpu-blocks-override", "24")
"""Blocks of 64 tokens: what one request of the greatest length needs, and half as much again."""
HITS = "vllm:external_prefix_cache_hits_total"


@pytest.fixture(scope="module")
def beside(fleet: Fleet) -> Iterator[tuple[Running, Running, Running]]:
    """A prefill and a decode engine as their flags make them, and a decode engine that looks for offloaded blocks
    first, which has to be said by hand."""
    model = fleet.tiny("four-heads")
    flags = (*FEW, "--kv-transfer-config", json.dumps(OFFLOADING))
    prefill = fleet.prepare("beside-p", "prefill", model=model, block_size=64, kv_mib=64, flags=flags)
    decode = fleet.prepare("beside-d", "decode", model=model, block_size=64, kv_mib=64, flags=flags)
    (port,) = engines.free_ports(1)
    ours = {
        "kv_connector": "DeepLinkConnector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"config": str(fleet.config), "control_port": control_port(port)},
    }
    by_hand = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"connectors": [OFFLOADING, ours]},
    }
    other = fleet.prepare(
        "beside-o",
        "",
        port=port,
        model=model,
        block_size=64,
        kv_mib=64,
        flags=(*FEW, "--kv-transfer-config", json.dumps(by_hand)),
    )
    with fleet.running(prefill, decode, other):
        yield prefill, decode, other


def crowd_out(engine: Running, seed: int) -> None:
    """Other prompts take the blocks of all that went before."""
    for index in range(2):
        http(engine.url + "/v1/completions", completion(prompt(900, seed=seed + index), 1))


def test_handed_over_and_offloaded(beside: tuple[Running, Running, Running]) -> None:
    """What was handed over is right, is offloaded by the decode engine, and is right when it comes back from there."""
    prefill, decode, _ = beside
    for tokens in (5, 130, 640):
        body = completion(prompt(tokens, seed=9400 + tokens), 32)
        before = decode.loaded_tokens
        answer, name = hand_over(prefill, decode, body)
        assert decode.loaded_tokens - before == tokens - 1
        assert token_ids(answer) == token_ids(decode.alone(body))
        assert prefill.handoff(name)["digest"] == decode.handoff(name)["digest"] != ""
        quiet(prefill, decode)
    crowd_out(decode, 9410)
    before = decode.metric(HITS)
    again = http(decode.url + "/v1/completions", body).json
    assert decode.metric(HITS) - before >= 576  # nine blocks of 64
    assert token_ids(again) == token_ids(answer)
    crowd_out(decode, 9420)
    answer, name = hand_over(prefill, decode, body)  # deeplink's comes first
    assert token_ids(answer) == token_ids(again)
    assert decode.handoff(name)["tokens"] == 639
    quiet(prefill, decode)


def test_prefill_takes_what_it_has_offloaded(beside: tuple[Running, Running, Running]) -> None:
    """Blocks that came back from elsewhere are handed over as those that were computed."""
    prefill, decode, _ = beside
    body = completion(prompt(640, seed=9500), 32)
    http(prefill.url + "/v1/completions", {**body, "max_tokens": 1})
    crowd_out(prefill, 9510)
    before = prefill.metric(HITS)
    answer, _ = hand_over(prefill, decode, body)
    assert prefill.metric(HITS) - before >= 576
    assert token_ids(answer) == token_ids(decode.alone(body))
    quiet(prefill, decode)


def test_what_the_other_connector_loads_lets_the_producer_go(beside: tuple[Running, Running, Running]) -> None:
    prefill, _, other = beside
    body = completion(prompt(640, seed=9600), 32)
    first, name = hand_over(prefill, other, body)
    assert other.handoff(name)["tokens"] == 639
    quiet(prefill, other)
    crowd_out(other, 9610)
    before = other.metric(HITS)
    again, name = hand_over(prefill, other, body)
    assert other.metric(HITS) - before >= 576
    assert token_ids(again) == token_ids(first) == token_ids(other.alone(body))
    assert (prefill.handoff(name)["state"], prefill.handoff(name)["tokens"]) == ("drained", 0)
    quiet(prefill, other)
