"""Claims that come while prefill has not ended: what a decode engine with few blocks does with them.

Of its 23 blocks of 64 tokens a request of the greatest length needs 16, so that early claims may hold 7. The prefill
engine has room for 256 tokens in staging.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from fleet import DEFAULT, VERSIONS, Fleet, Pair, Running, completion, http, prompt, quiet, token_ids

SHORT = ("--max-num-batched-tokens", "128")
FEW = ("--num-gpu-blocks-override", "24", "--max-model-len", "1024")
TOKEN_BYTES = 4 * 2 * 4 * 32 * 4


def start(fleet: Fleet, version: str) -> Pair:
    narrow = fleet.folder / "narrow.toml"
    narrow.write_text(f"[kv]\nstaging = {256 * TOKEN_BYTES}\nchunk = {64 * TOKEN_BYTES}\n")
    more = {"model": fleet.tiny("four-heads"), "kv_mib": 64, "version": version}
    prefill = fleet.prepare(f"early-p-{version}", "prefill", block_size=32, flags=SHORT, config=narrow, **more)
    decode = fleet.prepare(f"early-d-{version}", "decode", block_size=64, flags=FEW, **more)
    fleet.start(prefill, decode)
    return Pair(fleet, prefill, decode, fleet.router(prefill, decode))


@pytest.fixture(scope="module")
def narrow(fleet: Fleet) -> Iterator[Pair]:
    made = start(fleet, DEFAULT)
    yield made
    made.prefill.process.stop()
    made.decode.process.stop()


@contextmanager
def frozen(running: Running) -> Iterator[None]:
    pids = running.process.descendants()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def test_a_claim_holds_nothing_before_its_prefill_has_begun(narrow: Pair) -> None:
    """Two prompts that would fill the cache are put off, and a third that is not handed over goes past them."""
    waiting = [completion(prompt(800, seed=9000 + index), 8) for index in range(2)]
    passing = completion(prompt(900, seed=9010), 8)
    with ThreadPoolExecutor(2) as pool:
        with frozen(narrow.prefill):
            answers = [pool.submit(http, narrow.router + "/v1/completions", body, seconds=90) for body in waiting]
            time.sleep(1.0)  # enough to be admitted, if it were to be
            assert narrow.decode.held["blocks"] == 0
            assert len(token_ids(narrow.decode.alone(passing))) == 8
            assert not any(answer.done() for answer in answers)
        results = [answer.result(60) for answer in answers]
    for body, answer in zip(waiting, results, strict=True):
        assert (answer.status, answer.headers["x-deeplink-path"]) == (200, "handoff")
        assert token_ids(answer.json) == token_ids(narrow.decode.alone(body))
    quiet(narrow.prefill, narrow.decode)


def test_some_of_a_cache_is_on_its_way_before_prefill_has_ended(narrow: Pair) -> None:
    before = narrow.prefill.metric("vllm:deeplink_kv_early_bytes_total")
    body = completion(prompt(430, seed=9100), 8)  # seven blocks: as many as early claims may hold
    answer = http(narrow.router + "/v1/completions", body)
    assert token_ids(answer.json) == token_ids(narrow.decode.alone(body))
    http(narrow.router + "/v1/completions", completion(prompt(40, seed=9101), 2))  # its end is told at the next step
    quiet(narrow.prefill, narrow.decode)
    assert narrow.prefill.metric("vllm:deeplink_kv_early_bytes_total") > before


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


def test_more_than_there_is_room_for(narrow: Pair) -> None:
    many(narrow, 16, seed=9200)


@pytest.mark.long
@pytest.mark.parametrize("version", [version for version in VERSIONS if version != DEFAULT])
def test_more_than_there_is_room_for_in_other_versions(fleet: Fleet, version: str) -> None:
    pair = start(fleet, version)
    many(pair, 16, seed=9300)
    pair.prefill.process.stop()
    pair.decode.process.stop()
