"""bf16: a cache packed without AMX is handed to one packed with AMX, which has the same shape and strides.

The built-in NIXL connector accepts this pair and answers garbage with status 200.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fleet import Fleet, Pair, completion, http, prompt, quiet, token_ids
from matrix import Matrix

NEAR_TIE = 0.35
"""Where two bf16 runs part, their two best tokens may differ by this much in log-probability, and no more."""


@pytest.fixture(scope="module")
def packed(fleet: Fleet) -> Iterator[Pair]:
    prefill = fleet.prepare("plain", "prefill", block_size=64, dtype="bfloat16", env={"DEEPLINK_TESTING_ISA": "vec"})
    decode = fleet.prepare("amx", "decode", block_size=128, dtype="bfloat16", env={"DEEPLINK_TESTING_ISA": "amx"})
    with fleet.running(prefill, decode):
        yield Pair(fleet, prefill, decode, fleet.router(prefill, decode, dispatch="together"))


def test_the_packings_differ(packed: Pair) -> None:
    (ours,), (theirs,) = packed.prefill.contract.groups, packed.decode.contract.groups
    assert ours.dtype == theirs.dtype == "bfloat16"
    assert ours.layout == "block head (k: dim token | v: token dim)"
    assert theirs.layout.startswith("block head (k: token/16 ")


@pytest.mark.parametrize("tokens", [5, 64, 200, 500, 900])
def test_without_amx_to_amx(packed: Pair, matrix: Matrix, tokens: int) -> None:
    body = completion(prompt(tokens, seed=tokens), logprobs=2)
    before = packed.decode.loaded_tokens
    answer = http(packed.router + "/v1/completions", body)
    assert answer.status == 200, answer.data
    assert packed.decode.loaded_tokens - before == tokens - 1
    _assert_same_but_for_near_ties(answer.json, packed.decode.alone(body))
    quiet(packed.prefill, packed.decode)
    name = answer.headers["x-deeplink-handoff"]
    assert packed.prefill.handoff(name)["digest"] == packed.decode.handoff(name)["digest"] != ""
    matrix.record(packed.prefill.contract, packed.decode.contract, "exact")


def test_another_dtype_is_refused_by_name(pair: Pair, packed: Pair, matrix: Matrix) -> None:
    """SGLang and LMDeploy accept unlike dtypes and answer with wrong tokens."""
    router = packed.fleet.router(pair.prefill, packed.decode)
    answer = http(router + "/v1/completions", completion(prompt(100, seed=7)))
    assert (answer.status, answer.error["code"]) == (503, "contract_refused")
    assert (answer.error["ours"], answer.error["theirs"]) == ("float32", "bfloat16")
    quiet(pair.prefill, packed.decode, seconds=0.5)
    matrix.record(pair.prefill.contract, packed.decode.contract, f"refused ({answer.error['field']})")


def _assert_same_but_for_near_ties(ours: Any, theirs: Any) -> None:
    """bf16 rounds differently when the last token is computed alone, so the first near-tie may go either way."""
    a, b = token_ids(ours), token_ids(theirs)
    for index, (x, y) in enumerate(zip(a, b, strict=True)):
        if x != y:
            best = sorted(theirs["choices"][0]["logprobs"]["top_logprobs"][index].values(), reverse=True)
            assert best[0] - best[1] < NEAR_TIE, f"token {index} of {a} and {b}"
            return
