"""Migrations where either engine is spread over two processes of Ray's, each of which has a head of every layer."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fleet import http, quiet, records, ticketed
from lmdeploy_engine import Lmdeploy
from matrix import Matrix
from programs import say
from small import DTYPE, near

from deeplink.local import engines, lmdeploy, overlay
from deeplink.local.engines import Engine
from deeplink.local.environment import Environment
from deeplink.local.process import wait_all_ready

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900), pytest.mark.usefixtures("workers_know")]
START_SECONDS = 300.0
LENGTHS = (5, 16, 17, 64, 65, 200, 500, 900)
TOKENS = 32
ROUNDS = 5
SPREAD = ("--tp", "2", "--distributed-executor-backend")


class Engines:
    """Prefill engines have blocks of 16 tokens, decode engines of 64."""

    def __init__(self, python: Path, model: Path, folder: Path) -> None:
        self._environment = Environment(python.parents[1])
        self._model = model
        self._folder = folder

    def prepare(self, role: str, processes: int, by: str = "ray", **env: str) -> Lmdeploy:
        (port,) = engines.free_ports(1)
        engine = Engine(
            name=f"{role}-{processes}",
            role=role,
            port=port,
            model=self._model,
            dtype=DTYPE,
            block_size={"prefill": 16, "decode": 64}[role],
            max_num_seqs=8,
            flags=(*SPREAD, by) if processes > 1 else (),
            env={"RAY_USAGE_STATS_ENABLED": "0", **env},
        )
        process = lmdeploy.process(engine, self._environment, overlay.ensure(say), self._folder)
        return Lmdeploy(engine, process, self._environment)

    @contextlib.contextmanager
    def running(self, *made: Lmdeploy) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for one in made:
                stack.enter_context(one.process)
            wait_all_ready([one.process for one in made], START_SECONDS)
            yield


@pytest.fixture
def made(with_ray: Path, small_model: Path, tmp_path: Path) -> Engines:
    return Engines(with_ray, small_model, tmp_path)


@pytest.mark.parametrize(("produce", "consume"), [(1, 2), (2, 1), (2, 2)])
def test_unequal_and_equal_numbers_of_processes(
    made: Engines, small_model: Path, in_lmdeploy: Any, produce: int, consume: int, request: pytest.FixtureRequest
) -> None:
    """One at a time and at once: digests are equal on both sides, what is told of the tokens is right, and nothing is
    held after; also where some are given up."""
    prefill, decode = made.prepare("prefill", produce), made.prepare("decode", consume)
    with made.running(prefill, decode):
        assert [len(one.contract.ranks) for one in (prefill, decode)] == [produce, consume]
        answers = [handed_over(prefill, decode, length) for length in LENGTHS]
        with ThreadPoolExecutor(8) as pool:
            answers += pool.map(lambda length: handed_over(prefill, decode, length), LENGTHS * ROUNDS)
        quiet(prefill, decode)
        found = json.loads(in_lmdeploy("beside_transformers.py", small_model, DTYPE, given=json.dumps(answers)))
        near(found, [len(answer["prompt"]) for answer in answers])
        record = Matrix()
        record.record(prefill.contract, decode.contract, "exact")
    record.write({request.node.nodeid})


def handed_over(prefill: Lmdeploy, decode: Lmdeploy, length: int) -> dict[str, Any]:
    ids = [3 + (7919 * (place + length)) % 990 for place in range(length)]
    name, ticket = ticketed(prefill, decode, 120)
    for engine, side, count in ((prefill, "produce", 1), (decode, "consume", TOKENS)):
        params = {"kv_transfer_params": {"deeplink": {"side": side, "ticket": ticket}}}
        body = engine.body(ids, count, return_logprob=True, **params)
        answer = http(engine.url + "/v1/chat/completions", body, seconds=120)
        assert answer.status == 200, answer.data
    ours, theirs = records(prefill, decode, name)
    assert ours["digest"] == theirs["digest"] != "", length
    choice = answer.json["choices"][0]
    logprobs = [float(value) for value, _ in choice["output_token_logprobs"]]
    assert len(choice["output_ids"]) == TOKENS
    return {"prompt": ids, "tokens": choice["output_ids"], "logprobs": logprobs}
