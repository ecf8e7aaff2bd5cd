"""Speculation from the prompt's own n-grams: it keeps nothing in the cache, so either engine may do it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from fleet import Fleet, Running, completion, hand_over, prompt, quiet, token_ids

pytestmark = pytest.mark.long

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.fixture(scope="module")
def speculating(fleet: Fleet) -> Iterator[tuple[Running, Running]]:
    """One engine that speculates, and one that does not."""
    more = {"model": fleet.tiny("four-heads"), "kv_mib": 64}
    flags = ("--speculative-config", json.dumps(NGRAM))
    with_it = fleet.prepare("ngram", "both", block_size=32, flags=flags, **more)
    without = fleet.prepare("no-ngram", "both", block_size=64, **more)
    with fleet.running(with_it, without):
        yield with_it, without


@pytest.mark.parametrize("tokens", [5, 64, 333, 900])
@pytest.mark.parametrize("decoding", ["speculates", "does not"])
def test_one_side_speculates(speculating: tuple[Running, Running], decoding: str, tokens: int) -> None:
    with_it, without = speculating
    prefill, decode = (without, with_it) if decoding == "speculates" else (with_it, without)
    # A prompt that repeats itself, so that there is something to guess from.
    body = completion((prompt(25, seed=9950 + tokens) * 40)[:tokens], 48)
    before = with_it.metric("vllm:spec_decode_num_draft_tokens_total")
    answer, name = hand_over(prefill, decode, body)
    if decoding == "speculates" and tokens > 64:
        assert with_it.metric("vllm:spec_decode_num_draft_tokens_total") > before
    quiet(prefill, decode)
    assert prefill.handoff(name)["digest"] == decode.handoff(name)["digest"] != ""
    assert token_ids(answer) == token_ids(decode.alone(body)) == token_ids(without.alone(body))
