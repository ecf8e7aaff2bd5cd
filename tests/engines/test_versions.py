"""Every tested version of vLLM hands over, to itself and to the others, and what fails is told in its own way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fleet import DEFAULT, VERSIONS, Fleet, Pair, Running, completion, hand_over, http, prompt, quiet, token_ids
from matrix import Matrix

from deeplink.errors import LocalError

LENGTHS = (5, 17, 64, 129, 200, 333, 500, 900)
OLDER = tuple(version for version in VERSIONS if version != DEFAULT)
CYCLE = {("0.27.1", "0.32.0"), ("0.32.0", "0.29.0"), ("0.29.0", "0.27.1")}
"""In the short run each version prefills once and decodes once."""

UNLIKE = [
    pytest.param(a, b, marks=() if (a, b) in CYCLE else pytest.mark.long, id=f"{a}-to-{b}")
    for a in VERSIONS
    for b in VERSIONS
    if a != b
]


@pytest.fixture(scope="module")
def older(fleet: Fleet) -> Iterator[dict[str, Running]]:
    """The versions before the default one, each in an engine that can do both. The last computes again what fails."""
    again = fleet.folder / "again.toml"
    again.write_text('[kv]\non_failure = "recompute"\n')
    made = {
        version: fleet.prepare(
            f"vllm-{version}",
            "both",
            version=version,
            block_size=(64, 32)[index],
            config=again if version == OLDER[-1] else fleet.config,
        )
        for index, version in enumerate(OLDER)
    }
    fleet.start(*made.values())
    yield made
    for running in made.values():
        running.process.stop()


def exact(prefill: Running, decode: Running, seed: int) -> None:
    """64 greedy tokens after each of 8 prompts are the decode engine's own, on what was handed over."""
    for tokens in LENGTHS:
        body = completion(prompt(tokens, seed=seed + tokens))
        before = decode.loaded_tokens
        answer, name = hand_over(prefill, decode, body)
        assert decode.loaded_tokens - before == tokens - 1
        assert token_ids(answer) == token_ids(decode.alone(body))
        quiet(prefill, decode)
        ours, theirs = prefill.handoff(name), decode.handoff(name)
        assert (ours["state"], theirs["state"]) == ("drained", "loaded")
        assert ours["digest"] == theirs["digest"] != ""


@pytest.mark.parametrize(("prefill", "decode"), UNLIKE)
def test_unlike_versions(pair: Pair, older: dict[str, Running], matrix: Matrix, prefill: str, decode: str) -> None:
    producer, consumer = older.get(prefill, pair.prefill), older.get(decode, pair.decode)
    assert (producer.contract.engine_version, consumer.contract.engine_version) == (prefill, decode)
    exact(producer, consumer, seed=7000 + 1000 * VERSIONS.index(prefill) + 10 * VERSIONS.index(decode))
    matrix.record(producer.contract, consumer.contract, "exact")


def test_damage_on_the_way_is_an_error(pair: Pair, older: dict[str, Running]) -> None:
    """A version that tells a failed load by its blocks; the error is the same."""
    body = completion(prompt(200, seed=7801))
    router = pair.fleet.router(pair.prefill, older[OLDER[0]])
    pair.fleet.fault.write_text("flip")
    try:
        answer = http(router + "/v1/completions", body)
    finally:
        pair.fleet.fault.write_text("")
    assert (answer.status, answer.error["code"]) == (502, "digest_mismatch")
    quiet(pair.prefill, older[OLDER[0]])


def test_what_arrives_damaged_is_computed_again(pair: Pair, older: dict[str, Running]) -> None:
    """The first block that was to be loaded is what is told, so nothing of the rest is taken for loaded."""
    decode = older[OLDER[-1]]
    shared = prompt(96, seed=7802)
    http(decode.url + "/v1/completions", completion(shared, 1))  # three blocks are cached: the load begins behind them
    body = completion(shared + prompt(230, seed=7803), 16)
    pair.fleet.fault.write_text("flip")
    try:
        answer, name = hand_over(pair.prefill, decode, body)
    finally:
        pair.fleet.fault.write_text("")
    assert token_ids(answer) == token_ids(decode.alone(body))
    quiet(pair.prefill, decode)
    assert decode.handoff(name)["reason"]["code"] == "digest_mismatch"


@pytest.mark.parametrize("version", OLDER)
def test_a_forged_ticket_is_no_answer_from_blocks_that_hold_nothing(older: dict[str, Running], version: str) -> None:
    """Denied before anything is loaded: an error where that is the policy, else computed there."""
    engine = older[version]
    body = completion(prompt(130, seed=7804), 8)
    forged = {"kv_transfer_params": {"deeplink": {"side": "consume", "ticket": "x"}}}
    for _ in range(2):  # the second time all but the last token is cached, so there is nothing to load
        answer = http(engine.url + "/v1/completions", {**body, **forged})
        if version == OLDER[-1]:
            assert token_ids(answer.json) == token_ids(engine.alone(body))
        else:
            assert answer.status == 500
        quiet(engine)
        http(engine.url + "/v1/completions", body)
    quiet(engine)


@pytest.mark.long
@pytest.mark.parametrize("version", OLDER)
def test_a_version_with_itself(fleet: Fleet, matrix: Matrix, version: str) -> None:
    prefill = fleet.prepare(f"prefill-{version}", "prefill", version=version, block_size=64)
    decode = fleet.prepare(f"decode-{version}", "decode", version=version, block_size=128)
    fleet.start(prefill, decode)
    exact(prefill, decode, seed=7900)
    matrix.record(prefill.contract, decode.contract, "exact")
    prefill.process.stop()
    decode.process.stop()


@pytest.mark.long
@pytest.mark.parametrize("version", OLDER)
def test_several_cache_groups_are_refused_by_name(fleet: Fleet, version: str) -> None:
    """A failed load could not be told from a good one; see test_hybrid for the version that can."""
    engine = fleet.prepare(f"hybrid-{version}", "both", version=version, model=fleet.tiny("hybrid"), kv_mib=64)
    with pytest.raises(LocalError):
        fleet.start(engine)
    assert "KV cache groups: ours 2, theirs 1" in (fleet.folder / f"hybrid-{version}.log").read_text()
