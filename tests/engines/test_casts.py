"""Caches of unlike element types: exact where nothing is lost, lossy where both operators consent, else refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fleet import Fleet, Pair, Running, completion, hand_over, http, prompt, quiet, token_ids
from matrix import Matrix

from deeplink.kvconnector.contracts.negotiate import Agreement, negotiate

DRIFT = 0.25
"""How far the log-probability of the first new token may move when prefill was computed in fewer bits."""


@pytest.fixture(scope="module")
def halves(fleet: Fleet) -> Iterator[tuple[Running, Running]]:
    """A prefill engine in bf16 that consents to nothing, and an engine in fp16 that consents to fp32 -> fp16."""
    consent = fleet.folder / "consent.toml"
    consent.write_text('[kv]\ncasts = ["float32->float16", "bfloat16->float16"]\non_failure = "recompute"\n')
    prefill = fleet.prepare("bf16", "prefill", block_size=64, dtype="bfloat16")
    decode = fleet.prepare("fp16", "decode", block_size=32, dtype="float16", config=consent)
    with fleet.running(prefill, decode):
        yield prefill, decode


def close(prefill: Running, decode: Running, tokens: int, seed: int) -> None:
    body = completion(prompt(tokens, seed=seed), 1, logprobs=1)
    before = decode.loaded_tokens
    answer, name = hand_over(prefill, decode, body)
    assert decode.loaded_tokens - before == tokens - 1
    alone = decode.alone(body)
    assert abs(_first(answer) - _first(alone)) < DRIFT
    quiet(prefill, decode)
    assert prefill.handoff(name)["digest"] == decode.handoff(name)["digest"] != ""


def _first(answer: Any) -> float:
    value: float = answer["choices"][0]["logprobs"]["token_logprobs"][0]
    return value


@pytest.mark.parametrize("tokens", [5, 200, 900])
def test_bf16_is_widened_exactly(pair: Pair, halves: tuple[Running, Running], matrix: Matrix, tokens: int) -> None:
    bf16, _ = halves
    agreement = negotiate(bf16.contract, pair.decode.contract)
    assert isinstance(agreement, Agreement)
    assert agreement.exact
    close(bf16, pair.decode, tokens, seed=4000 + tokens)
    matrix.record(bf16.contract, pair.decode.contract, "exact")


def test_a_loss_that_one_side_does_not_consent_to_is_refused(
    pair: Pair, halves: tuple[Running, Running], matrix: Matrix
) -> None:
    bf16, fp16 = halves
    answer = http(pair.fleet.router(bf16, fp16) + "/v1/completions", completion(prompt(100, seed=7)))
    assert (answer.status, answer.error["code"]) == (503, "contract_refused")
    assert (answer.error["ours"], answer.error["theirs"]) == ("bfloat16", "float16")
    assert 'casts = ["bfloat16->float16"]' in answer.error["message"]
    quiet(bf16, fp16, seconds=0.5)
    matrix.record(bf16.contract, fp16.contract, f"refused ({answer.error['field']})")


@pytest.mark.parametrize("tokens", [5, 200, 900])
def test_a_loss_that_both_consent_to_is_declared(
    pair: Pair, halves: tuple[Running, Running], matrix: Matrix, tokens: int
) -> None:
    _, fp16 = halves
    agreement = negotiate(pair.prefill.contract, fp16.contract)
    assert isinstance(agreement, Agreement)
    assert not agreement.exact
    close(pair.prefill, fp16, tokens, seed=5000 + tokens)
    matrix.record(pair.prefill.contract, fp16.contract, f"lossy ({agreement.casts[0].name})")


@pytest.mark.parametrize("fault", ["flip", "zero-v"])
def test_what_arrives_damaged_is_computed_again_where_the_operator_says_so(
    pair: Pair, halves: tuple[Running, Running], fault: str
) -> None:
    """`on_failure = "recompute"`: the answer is the decode engine's own, and the handoff is not called loaded."""
    _, fp16 = halves
    body = completion(prompt(200, seed=6000 + len(fault)), 16)
    pair.fleet.fault.write_text(fault)
    try:
        answer, name = hand_over(pair.prefill, fp16, body)
    finally:
        pair.fleet.fault.write_text("")
    assert token_ids(answer) == token_ids(fp16.alone(body))
    quiet(pair.prefill, fp16)
    record = fp16.handoff(name)
    assert (record["state"], record["reason"]["code"]) == ("failed", "digest_mismatch")
