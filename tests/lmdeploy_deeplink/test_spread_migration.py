"""Migrations where either engine is spread over two processes of Ray's, each of which has a head of every layer."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from fleet import Answer, http, quiet, records, ticketed
from lmdeploy_engine import Lmdeploy
from matrix import Matrix
from programs import say
from small import DTYPE, REFUSED_SECONDS, near

from deeplink import secret
from deeplink.errors import LocalError
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
        # At once: one's control port is not the other's port.
        self._ports = engines.free_ports(2)

    def prepare(self, role: str, processes: int, by: str = "ray", **env: str) -> Lmdeploy:
        engine = Engine(
            name=f"{role}-{processes}",
            role=role,
            port=self._ports[role == "decode"],
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


@pytest.fixture(scope="module")
def matrix(request: pytest.FixtureRequest) -> Iterator[Matrix]:
    """Written when nothing failed."""
    found = Matrix()
    yield found
    if not request.session.testsfailed:
        found.write({item.nodeid for item in request.session.items if item.path == request.path})


@pytest.fixture
def made(with_ray: Path, small_model: Path, tmp_path: Path) -> Engines:
    return Engines(with_ray, small_model, tmp_path)


@pytest.mark.parametrize(("produce", "consume"), [(1, 2), (2, 1), (2, 2)])
def test_unequal_and_equal_numbers_of_processes(
    made: Engines, small_model: Path, in_lmdeploy: Any, produce: int, consume: int, matrix: Matrix
) -> None:
    """One at a time and at once, where some are given up: digests are equal on both sides, what is told of the tokens
    is right, and nothing is held after. With an engine that lets its cache go nothing is handed over any more."""
    prefill, decode = made.prepare("prefill", produce), made.prepare("decode", consume)
    with made.running(prefill, decode):
        assert [len(one.contract.ranks) for one in (prefill, decode)] == [produce, consume]
        answers = [handed_over(prefill, decode, length) for length in LENGTHS]
        lengths = [length if number % 5 else -length for number, length in enumerate(LENGTHS * ROUNDS)]
        with ThreadPoolExecutor(8) as pool:
            told = list(pool.map(lambda length: handed_over_or_given_up(prefill, decode, length), lengths))
        quiet(prefill, decode)
        answers += [answer for answer in told if answer is not None]
        assert len(answers) == len(LENGTHS) + sum(length > 0 for length in lengths)
        found = json.loads(in_lmdeploy("beside_transformers.py", small_model, DTYPE, given=json.dumps(answers)))
        near(found, [len(answer["prompt"]) for answer in answers])
        matrix.record(prefill.contract, decode.contract, "exact")
        sleeps(prefill, decode)


def sleeps(prefill: Lmdeploy, decode: Lmdeploy) -> None:
    """What its control endpoint tells would be wrong after it: it has another cache when it wakes up."""
    _, ticket = ticketed(prefill, decode, 5)
    assert http(f"{decode.url}/sleep?level=1", {}, seconds=60).status == 200
    with pytest.raises(OSError, match="refused"):
        decode.control("/v1/status")
    assert http(f"{decode.url}/wakeup", {}, seconds=60).status == 200
    assert ask(prefill, "produce", ticket, [7, 8, 9], 1).status == 200
    assert ask(decode, "consume", ticket, [7, 8, 9], 4).status != 200
    assert http(f"{decode.url}/v1/chat/completions", decode.body([7, 8, 9], 4), seconds=60).status == 200


def test_lmdeploys_own_workers_hand_nothing_over(made: Engines) -> None:
    engine = made.prepare("prefill", 2, by="mp")
    with engine.process, pytest.raises(LocalError):
        engine.process.wait_ready(REFUSED_SECONDS)
    assert "hands over where Ray runs them" in engine.process.log.read_text()


def handed_over_or_given_up(prefill: Lmdeploy, decode: Lmdeploy, length: int) -> dict[str, Any] | None:
    """Prompts of negative length are given up, by the client and by the router, in either engine."""
    if length > 0:
        return handed_over(prefill, decode, length)
    dice = random.Random(length)
    name, ticket = ticketed(prefill, decode, 60)
    ids, in_prefill = prompt(-length), dice.random() < 0.5
    if not in_prefill:
        assert ask(prefill, "produce", ticket, ids, 1).status == 200
    engine, side = (prefill, "produce") if in_prefill else (decode, "consume")
    connection = HTTPConnection(urlsplit(engine.url).netloc, timeout=60)
    body = json.dumps(engine.body(ids, TOKENS, **ticket_of(side, ticket)))
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    time.sleep(dice.uniform(0, 0.2))
    connection.close()
    for one in (prefill, decode):
        given_up = f"{one.control_url}/v1/handoffs/{name}"
        assert http(given_up, method="DELETE", token=secret.control_token(secret.load())).status == 204
    return None


def handed_over(prefill: Lmdeploy, decode: Lmdeploy, length: int) -> dict[str, Any]:
    ids = prompt(length)
    name, ticket = ticketed(prefill, decode, 120)
    for engine, side, count in ((prefill, "produce", 1), (decode, "consume", TOKENS)):
        answer = ask(engine, side, ticket, ids, count)
        assert answer.status == 200, answer.data
    ours, theirs = records(prefill, decode, name)
    assert ours["digest"] == theirs["digest"] != "", length
    choice = answer.json["choices"][0]
    logprobs = [float(value) for value, _ in choice["output_token_logprobs"]]
    assert len(choice["output_ids"]) == TOKENS
    return {"prompt": ids, "tokens": choice["output_ids"], "logprobs": logprobs}


def prompt(length: int) -> list[int]:
    return [3 + (7919 * (place + length)) % 990 for place in range(length)]


def ask(engine: Lmdeploy, side: str, ticket: str, ids: list[int], tokens: int) -> Answer:
    body = engine.body(ids, tokens, return_logprob=True, **ticket_of(side, ticket))
    return http(engine.url + "/v1/chat/completions", body, seconds=120)


def ticket_of(side: str, ticket: str) -> dict[str, Any]:
    return {"kv_transfer_params": {"deeplink": {"side": side, "ticket": ticket}}}
