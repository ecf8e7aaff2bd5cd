"""Every tested version of vLLM hands over, to itself and to the others, and what fails is told in its own way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fleet import (
    DEFAULT,
    VERSIONS,
    Answer,
    Fleet,
    Running,
    claim,
    completion,
    exact,
    http,
    prompt,
    quiet,
    token_ids,
)
from matrix import Matrix

from deeplink.errors import LocalError

LENGTHS = (5, 17, 64, 129, 200, 333, 500, 900)
OLDER = tuple(version for version in VERSIONS if version != DEFAULT)
FAILS, RECOMPUTES = OLDER
CYCLE = {("0.27.1", "0.32.0"), ("0.32.0", "0.29.0"), ("0.29.0", "0.27.1")}
"""In the short run each version prefills once and decodes once."""

UNLIKE = [
    pytest.param(a, b, marks=() if (a, b) in CYCLE else pytest.mark.long, id=f"{a}-to-{b}")
    for a in VERSIONS
    for b in VERSIONS
    if a != b
]


@pytest.fixture(scope="module")
def running(fleet: Fleet) -> Iterator[dict[str, Running]]:
    """An engine of each version, which can do both, with blocks of a size of its own. One computes again what fails."""
    again = fleet.folder / "again.toml"
    again.write_text('[kv]\non_failure = "recompute"\n')
    made = {
        version: fleet.prepare(
            f"vllm-{version}",
            "both",
            version=version,
            model=fleet.tiny("four-heads"),
            block_size=block,
            kv_mib=64,
            config=again if version == RECOMPUTES else fleet.config,
        )
        for version, block in zip(VERSIONS, (64, 32, 128), strict=True)
    }
    with fleet.running(*made.values()):
        yield made


def exact_at_all_lengths(prefill: Running, decode: Running, seed: int) -> None:
    for tokens in LENGTHS:
        assert exact(prefill, decode, tokens, seed + tokens, answer=64) != ""


@pytest.mark.parametrize(("prefill", "decode"), UNLIKE)
def test_unlike_versions(running: dict[str, Running], matrix: Matrix, prefill: str, decode: str) -> None:
    producer, consumer = running[prefill], running[decode]
    assert (producer.contract.engine_version, consumer.contract.engine_version) == (prefill, decode)
    exact_at_all_lengths(producer, consumer, seed=7000 + 1000 * VERSIONS.index(prefill) + 10 * VERSIONS.index(decode))
    matrix.record(producer.contract, consumer.contract, "exact")


def damaged(fleet: Fleet, prefill: Running, decode: Running, body: dict[str, Any]) -> tuple[Answer, str]:
    """The answer to a request of whose cache one bit is changed on its way, and the handoff."""
    fleet.fault.write_text("flip")
    try:
        return claim(prefill, decode, body)
    finally:
        fleet.fault.write_text("")


def test_damage_on_the_way_is_an_error(fleet: Fleet, running: dict[str, Running]) -> None:
    """A version that tells a failed load by its blocks; the error is the same."""
    prefill, decode = running[DEFAULT], running[FAILS]
    answer, name = damaged(fleet, prefill, decode, completion(prompt(200, seed=7801)))
    assert answer.status == 500
    quiet(prefill, decode)
    assert decode.handoff(name)["reason"]["code"] == "digest_mismatch"


def test_what_arrives_damaged_is_computed_again(fleet: Fleet, running: dict[str, Running]) -> None:
    """The first block that was to be loaded is what is told, so nothing of the rest is taken for loaded."""
    prefill, decode = running[DEFAULT], running[RECOMPUTES]
    shared = prompt(96, seed=7802)
    http(decode.url + "/v1/completions", completion(shared, 1))  # three blocks are cached: the load begins behind them
    body = completion(shared + prompt(230, seed=7803), 16)
    answer, name = damaged(fleet, prefill, decode, body)
    assert token_ids(answer.json) == token_ids(decode.alone(body))
    quiet(prefill, decode)
    assert decode.handoff(name)["reason"]["code"] == "digest_mismatch"


@pytest.mark.parametrize("version", OLDER)
def test_a_forged_ticket_is_no_answer_from_blocks_that_hold_nothing(running: dict[str, Running], version: str) -> None:
    """Denied before anything is loaded: an error where that is the policy, else computed there."""
    engine = running[version]
    body = completion(prompt(129, seed=7804), 8)
    forged = {"kv_transfer_params": {"deeplink": {"side": "consume", "ticket": "x"}}}
    for _ in range(2):  # the second time all but the last token is cached, so there is nothing to load
        answer = http(engine.url + "/v1/completions", {**body, **forged})
        if version == RECOMPUTES:
            assert token_ids(answer.json) == token_ids(engine.alone(body))
        else:
            assert answer.status == 500
        quiet(engine)
        http(engine.url + "/v1/completions", body)
    quiet(engine)


@pytest.mark.long
@pytest.mark.parametrize("version", OLDER)
def test_a_version_with_itself(fleet: Fleet, matrix: Matrix, version: str) -> None:
    model = fleet.tiny("four-heads")
    prefill = fleet.prepare(f"prefill-{version}", "prefill", version=version, block_size=64, model=model, kv_mib=64)
    decode = fleet.prepare(f"decode-{version}", "decode", version=version, block_size=128, model=model, kv_mib=64)
    with fleet.running(prefill, decode):
        exact_at_all_lengths(prefill, decode, seed=7900)
        matrix.record(prefill.contract, decode.contract, "exact")


@pytest.mark.long
@pytest.mark.parametrize("version", OLDER)
def test_several_cache_groups_are_refused_by_name(fleet: Fleet, version: str) -> None:
    """A failed load could not be told from a good one; see test_hybrid for the version that can."""
    engine = fleet.prepare(f"hybrid-{version}", "both", version=version, model=fleet.tiny("hybrid"), kv_mib=64)
    with pytest.raises(LocalError):
        fleet.start(engine)
    # Two kinds of layers, which vLLM puts into three groups of equal size.
    assert "KV cache groups: ours 3, theirs 1" in (fleet.folder / f"hybrid-{version}.log").read_text()


@pytest.mark.long
def test_a_state_is_refused_by_name(fleet: Fleet) -> None:
    """It is that after all that was computed, which vLLM does not end where a decode engine would go on from it."""
    engine = fleet.prepare("state", "both", model=fleet.tiny("state"), kv_mib=64)
    with pytest.raises(LocalError):
        fleet.start(engine)
    assert "kind of KV cache: ours MambaSpec" in (fleet.folder / "state.log").read_text()
