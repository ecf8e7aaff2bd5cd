"""Claims that come while prefill has not ended."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from fleet import VERSIONS, Fleet, Pair, completion, http, prompt, quiet, token_ids

from deeplink.kvconnector.handoffs.handoff import COMPLETE
from deeplink.local.process import frozen

SHORT = ("--max-num-batched-tokens", "128")
FEW = ("--num-gpu-blocks-override", "24", "--max-model-len", "1024")
TOKEN_BYTES = 4 * 2 * 4 * 32 * 4


@contextmanager
def narrow(fleet: Fleet, version: str) -> Iterator[Pair]:
    """Of the decode engine's 23 blocks of 64 tokens a request of the greatest length needs 16, so that early claims may
    hold 7. The prefill engine has room for 256 tokens in staging."""
    config = fleet.folder / "narrow.toml"
    config.write_text(f"[kv]\nstaging = {256 * TOKEN_BYTES}\nchunk = {64 * TOKEN_BYTES}\n")
    more = {"model": fleet.tiny("four-heads"), "kv_mib": 64, "version": version}
    prefill = fleet.prepare(f"early-p-{version}", "prefill", block_size=32, flags=SHORT, config=config, **more)
    decode = fleet.prepare(f"early-d-{version}", "decode", block_size=64, flags=FEW, **more)
    with fleet.running(prefill, decode):
        yield Pair(fleet, prefill, decode, fleet.router(prefill, decode, dispatch="together"))


def test_a_claim_holds_nothing_before_its_prefill_has_begun(pair: Pair) -> None:
    """Two are put off, and a request that is not handed over goes past them."""
    waiting = [completion(prompt(800, seed=9000 + index), 8) for index in range(2)]
    passing = completion(prompt(900, seed=9010), 8)
    with ThreadPoolExecutor(2) as pool:
        with frozen([pair.prefill.process]):
            answers = [pool.submit(http, pair.router + "/v1/completions", body, seconds=90) for body in waiting]
            time.sleep(1.0)  # enough to be admitted, if it were to be
            assert pair.decode.held["blocks"] == 0
            assert len(token_ids(pair.decode.alone(passing))) == 8
            assert not any(answer.done() for answer in answers)
        results = [answer.result(60) for answer in answers]
    for body, answer in zip(waiting, results, strict=True):
        assert (answer.status, answer.headers["x-deeplink-path"]) == (200, "handoff")
        assert token_ids(answer.json) == token_ids(pair.decode.alone(body))
    quiet(pair.prefill, pair.decode)


def test_some_of_a_cache_is_on_its_way_before_prefill_has_ended(pair: Pair) -> None:
    before = pair.prefill.metric("vllm:deeplink_kv_early_bytes_total")
    body = completion(prompt(900, seed=9100), 8)
    answer = http(pair.router + "/v1/completions", body)
    assert token_ids(answer.json) == token_ids(pair.decode.alone(body))
    http(pair.router + "/v1/completions", completion(prompt(40, seed=9101), 2))  # its end is told at the next step
    quiet(pair.prefill, pair.decode)
    assert pair.prefill.metric("vllm:deeplink_kv_early_bytes_total") > before
    stage = f"/v1/handoffs/{answer.headers['x-deeplink-handoff']}/stage?seconds=5"
    assert pair.prefill.control(stage).json == {"stage": COMPLETE}


def many(pair: Pair, requests: int, seed: int) -> None:
    """More at once than the cache and staging have room for, of all lengths: none waits for ever, and none is wrong."""
    bodies = [completion(prompt(40 + (index * 397) % 940, seed=seed + index), 24) for index in range(requests)]
    with ThreadPoolExecutor(requests) as pool:
        answers = list(pool.map(lambda body: http(pair.router + "/v1/completions", body, seconds=120), bodies))
    assert [answer.status for answer in answers] == [200] * requests, [answer.data for answer in answers]
    assert {answer.headers["x-deeplink-path"] for answer in answers} == {"handoff"}
    quiet(pair.prefill, pair.decode)
    for body, answer in zip(bodies, answers, strict=True):
        assert token_ids(answer.json) == token_ids(pair.decode.alone(body))


@pytest.mark.long
@pytest.mark.parametrize("version", VERSIONS)
def test_more_than_there_is_room_for(fleet: Fleet, version: str) -> None:
    with narrow(fleet, version) as made:
        many(made, 16, seed=9200)
