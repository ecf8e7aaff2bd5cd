"""Caches of 8-bit floating point, as vLLM's CPU attention keeps them with AVX-512 or AMX."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet import DEFAULT, VERSIONS, Fleet, Running, completion, hand_over, http, prompt, quiet, token_ids
from matrix import Matrix

from deeplink.kvconnector.contracts.negotiate import Agreement, negotiate

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        "avx512f" not in Path("/proc/cpuinfo").read_text(), reason="vLLM has such caches on CPUs with AVX-512 only"
    ),
]
LENGTHS = (5, 64, 130, 333, 900)


def start(fleet: Fleet, version: str, kind: str) -> tuple[Running, Running]:
    more = {"model": fleet.tiny("four-heads"), "kv_mib": 64, "version": version}
    flags = ("--kv-cache-dtype", kind)
    prefill = fleet.prepare(f"{kind}-p-{version}", "prefill", block_size=32, flags=flags, **more)
    decode = fleet.prepare(f"{kind}-d-{version}", "decode", block_size=64, flags=flags, **more)
    return prefill, decode


@pytest.fixture(scope="module")
def engines(fleet: Fleet) -> Iterator[tuple[Running, Running, Running]]:
    """Two of e4m3, and one with the model's own float32."""
    prefill, decode = start(fleet, DEFAULT, "fp8")
    wide = fleet.prepare("fp8-wide", "both", model=fleet.tiny("four-heads"), kv_mib=64, block_size=64)
    with fleet.running(prefill, decode, wide):
        yield prefill, decode, wide


def exact(prefill: Running, decode: Running, tokens: int, seed: int, *, alone: bool = True) -> None:
    body = completion(prompt(tokens, seed=seed), 32)
    before = decode.loaded_tokens
    answer, name = hand_over(prefill, decode, body)
    assert decode.loaded_tokens - before == tokens - 1
    quiet(prefill, decode)
    ours, theirs = prefill.handoff(name), decode.handoff(name)
    assert (ours["state"], theirs["state"]) == ("drained", "loaded")
    assert ours["digest"] == theirs["digest"] != ""
    if alone:
        assert token_ids(answer) == token_ids(decode.alone(body))


@pytest.mark.parametrize("tokens", LENGTHS)
def test_bytes_and_scales_are_handed_over(
    engines: tuple[Running, Running, Running], matrix: Matrix, tokens: int
) -> None:
    prefill, decode, _ = engines
    (group,) = prefill.contract.groups
    assert group.dtype == "float8_e4m3fn"
    assert group.scales is not None
    assert group.scales.values == (1.0,) * 2 * len(group.layers)
    exact(prefill, decode, tokens, seed=9700 + tokens)
    matrix.record(prefill.contract, decode.contract, "exact")


def test_a_wider_cache_has_room_for_every_value(engines: tuple[Running, Running, Running]) -> None:
    """What arrives is what the prefill engine had, so the answer is near that of its own kind, not of the wide one."""
    prefill, _, wide = engines
    agreement = negotiate(prefill.contract, wide.contract)
    assert isinstance(agreement, Agreement)
    assert agreement.exact
    exact(prefill, wide, 333, seed=9800, alone=False)


def test_a_narrower_one_needs_consent(fleet: Fleet, engines: tuple[Running, Running, Running], matrix: Matrix) -> None:
    _, decode, _ = engines
    wide = fleet.prepare("fp8-wide-p", "prefill", model=fleet.tiny("four-heads"), kv_mib=64, block_size=64)
    with fleet.running(wide):
        answer = http(fleet.router(wide, decode) + "/v1/completions", completion(prompt(100, seed=9850)))
        assert (answer.status, answer.error["code"]) == (503, "contract_refused")
        assert (answer.error["ours"], answer.error["theirs"]) == ("float32", "float8_e4m3fn")
        quiet(wide, decode, seconds=0.5)
        matrix.record(wide.contract, decode.contract, f"refused ({answer.error['field']})")


@pytest.mark.parametrize(
    ("version", "kind"), [(DEFAULT, "fp8_e5m2"), *((one, "fp8") for one in VERSIONS if one != DEFAULT)]
)
def test_other_types_and_versions(fleet: Fleet, matrix: Matrix, version: str, kind: str) -> None:
    prefill, decode = start(fleet, version, kind)
    with fleet.running(prefill, decode):
        for tokens in (5, 130, 900):
            exact(prefill, decode, tokens, seed=9900 + tokens)
        matrix.record(prefill.contract, decode.contract, "exact")
