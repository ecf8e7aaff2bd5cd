"""LMDeploy with each kind of engine on the other side, in 16 bits: it takes no others.

Two engines of unlike kinds round differently, so what is compared is what the decode engine's kind thinks of an answer:
its 64 tokens are forced upon one that computes prompt and answer at once. What an engine told of them that went on from
the cache of another may be at most twice as far from that as the same is when computed in chunks of 128 tokens.

The second of these is measured over 48 prompts, none of which is handed over. Over the eight that are it is as much
chance as what it is compared with: only three of them are more than one chunk, and LMDeploy that goes on from a cache
of LMDeploy's can fail that, too.
"""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import lmdeploy_engine
import pytest
import sglang_engine
from fleet import SERVED, Answer, Fleet, Running, completion, http, prompt, quiet, records, ticketed, token_ids
from lmdeploy_engine import Lmdeploy
from matrix import Matrix

pytestmark = pytest.mark.long
LENGTHS = (5, 16, 17, 64, 65, 200, 500, 900)
FORCED = (200, 500, 900)
"""Of these prompts vLLM is asked for each token apart: each is more than one chunk."""
TOKENS = 64
CHUNK = 128
SPREAD_LENGTHS = tuple(length for length in LENGTHS if length + TOKENS > CHUNK + 1)
"""Of the others everything that tells of an answer's tokens is in the first chunk."""
SPREAD_PROMPTS = 16
"""Of each length."""
_SEEDS = itertools.count(1)


@dataclass(frozen=True)
class Engines:
    """A prefill engine with blocks of 16 tokens, a decode engine with 64, and two like it that serve alone, the
    second of which computes a prompt in chunks."""

    fleet: Fleet
    prefill: Lmdeploy
    decode: Lmdeploy
    alone: Lmdeploy
    chunks: Lmdeploy


@pytest.fixture(scope="module")
def lmdeploy(fleet: Fleet) -> Iterator[Engines]:
    made = (
        lmdeploy_engine.prepare(fleet, "lmdeploy-prefill", "prefill", block=16),
        lmdeploy_engine.prepare(fleet, "lmdeploy-decode", "decode", block=64),
        lmdeploy_engine.prepare(fleet, "lmdeploy-alone", "", block=64),
        lmdeploy_engine.prepare(fleet, "lmdeploy-chunks", "", block=64, flags=("--max-prefill-token-num", str(CHUNK))),
    )
    fleet.start(*made)
    yield Engines(fleet, *made)
    for one in made:
        one.process.stop()


@pytest.fixture(scope="module")
def vllm(fleet: Fleet) -> Iterator[tuple[Running, Running]]:
    """Blocks of 32 tokens in the prefill engine, of 128 in the decode engine."""
    made = (
        fleet.prepare("vllm-lm-prefill", "prefill", block_size=32, dtype="bfloat16"),
        fleet.prepare("vllm-lm-decode", "decode", block_size=128, dtype="bfloat16"),
    )
    fleet.start(*made)
    yield made
    for one in made:
        one.process.stop()


@pytest.fixture(scope="module")
def sglang(fleet: Fleet) -> Iterator[tuple[Running, Running]]:
    """Pages of 32 tokens in the prefill engine, of 128 in the decode engine."""
    made = (
        sglang_engine.prepare(fleet, "sglang-lm-prefill", "prefill", page=32, dtype="bfloat16"),
        sglang_engine.prepare(fleet, "sglang-lm-decode", "decode", page=128, dtype="bfloat16"),
    )
    fleet.start(*made)
    yield made
    for one in made:
        one.process.stop()


@pytest.fixture(scope="module")
def answered(lmdeploy: Engines) -> list[tuple[list[int], list[int]]]:
    """Prompts, none of which is handed over, and what an engine that serves alone answers."""

    def answer(words: list[int]) -> tuple[list[int], list[int]]:
        told = _ask(lmdeploy.alone, words, TOKENS)
        assert told.status == 200, told.data
        return words, _ids(told.json)

    prompts = [prompt(n, seed=100_000 + 1000 * at + n) for at in range(SPREAD_PROMPTS) for n in SPREAD_LENGTHS]
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(answer, prompts, timeout=300))


@pytest.fixture(scope="module")
def spread(lmdeploy: Engines, answered: list[tuple[list[int], list[int]]]) -> float:
    """How far apart LMDeploy's log-probabilities are between chunks of 128 tokens and none."""
    return max(
        _apart(*(one.scores(words + ids, len(words))[0] for one in (lmdeploy.chunks, lmdeploy.alone)))
        for words, ids in answered
    )


def test_from_lmdeploy_to_lmdeploy(lmdeploy: Engines, spread: float, matrix: Matrix) -> None:
    _decoded_by_lmdeploy(lmdeploy, lmdeploy.prefill, spread, matrix)


def test_from_vllm_to_lmdeploy(lmdeploy: Engines, spread: float, vllm: tuple[Running, Running], matrix: Matrix) -> None:
    _decoded_by_lmdeploy(lmdeploy, vllm[0], spread, matrix)


def test_from_lmdeploy_to_vllm(lmdeploy: Engines, vllm: tuple[Running, Running], matrix: Matrix) -> None:
    """What was handed over is in vLLM's prefix cache, on which the forced tokens are computed."""
    decode = vllm[1]
    answers = _hand_over(lmdeploy.prefill, decode)
    apart, own = 0.0, 0.0
    for words, answer in answers:
        if len(words) not in FORCED:
            continue
        forced = token_ids(answer)
        salts = ["", *(f"{kind}-{len(words)}" for kind in ("whole", "chunks"))]
        for end in range(CHUNK, len(words), CHUNK):  # each computes what the one before has not
            _vllm(decode, words[:end], salts[2])
        handed, whole, chunks = (_forced(decode, words, forced, salt) for salt in salts)
        apart, own = max(apart, _apart(handed, whole)), max(own, _apart(chunks, whole))
    _near(apart, own)
    matrix.record(lmdeploy.prefill.contract, decode.contract, "exact")


def test_from_sglang_to_lmdeploy(
    lmdeploy: Engines, spread: float, sglang: tuple[Running, Running], matrix: Matrix
) -> None:
    _decoded_by_lmdeploy(lmdeploy, sglang[0], spread, matrix)


@pytest.mark.timeout(1200)  # two engines more, and each computes 48 prompts
def test_from_lmdeploy_to_sglang(
    lmdeploy: Engines,
    answered: list[tuple[list[int], list[int]]],
    sglang: tuple[Running, Running],
    matrix: Matrix,
) -> None:
    fleet, decode = lmdeploy.fleet, sglang[1]
    whole, chunks = (
        sglang_engine.prepare(fleet, f"sglang-lm-{size}", "", page=128, dtype="bfloat16", flags=_in_chunks(size))
        for size in (1024, CHUNK)
    )
    answers = _hand_over(lmdeploy.prefill, decode, return_logprob=True)
    fleet.start(whole, chunks)
    try:
        apart = max(
            _apart(
                answer["choices"][0]["logprobs"]["token_logprobs"],
                _sglang(whole, words + token_ids(answer), len(words)),
            )
            for words, answer in answers
        )
        own = max(
            _apart(*(_sglang(one, words + ids, len(words)) for one in (chunks, whole))) for words, ids in answered
        )
    finally:
        for one in (whole, chunks):
            one.process.stop()
    _near(apart, own)
    matrix.record(lmdeploy.prefill.contract, decode.contract, "exact")


def _in_chunks(size: int) -> tuple[str, ...]:
    # Of what others take of the host's memory while it starts SGLang thinks that it was its own. Its cache is small.
    memory = ("--mem-fraction-static", "0.8")
    return ("--chunked-prefill-size", str(size), "--disable-radix-cache", *memory)


def test_a_ticket_is_needed_and_has_to_be_this_engines(lmdeploy: Engines) -> None:
    """Straight to the engines, past the router: an error for this request, and the engines go on."""
    decode, words = lmdeploy.decode, prompt(30, seed=52)
    forged = {"kv_transfer_params": {"deeplink": {"side": "consume", "ticket": "x"}}}
    foreign = {
        "migration_request": {
            "protocol": 1,
            "remote_engine_id": lmdeploy.prefill.url,
            "remote_session_id": 5,
            "remote_token_id": 7,
            "remote_block_ids": [1, 2, 3],
        }
    }
    for fields in (forged, foreign):
        answer = http(decode.url + "/v1/chat/completions", decode.body(words, 4, **fields))
        assert answer.status in (400, 500), answer.data
    _, ticket = ticketed(lmdeploy.prefill, decode)
    wrong = {"kv_transfer_params": {"deeplink": {"side": "produce", "ticket": ticket}}}
    assert http(decode.url + "/v1/chat/completions", decode.body(words, 4, **wrong)).status in (400, 500)
    quiet(lmdeploy.prefill, decode)
    _hand_over(lmdeploy.prefill, decode, (40,))


def test_an_answer_of_one_token(lmdeploy: Engines) -> None:
    """It is the token that prefill has sampled; LMDeploy would compute another."""
    words = prompt(50, seed=61)
    ((_, answer),) = _hand_over(lmdeploy.prefill, lmdeploy.decode, (50,), tokens=1, seed=61 - 50)
    alone = http(lmdeploy.alone.url + "/v1/chat/completions", lmdeploy.alone.body(words, 1))
    assert _ids(answer) == _ids(alone.json)
    assert len(_ids(answer)) == 1


def test_200_requests_of_which_a_fifth_is_given_up_and_a_restart(fleet: Fleet) -> None:
    """No wrong token with status 200, no stuck request, nothing held after; errors only while the engine is away."""
    model = lmdeploy_engine.small_model(fleet)
    prefill = lmdeploy_engine.prepare(fleet, "lmdeploy-load-prefill", "prefill", block=16, model=model)
    decode = lmdeploy_engine.prepare(fleet, "lmdeploy-load-decode", "decode", block=64, model=model)
    fleet.start(prefill, decode)
    try:
        _two_hundred(fleet, prefill, decode)
    finally:
        for one in (prefill, decode):
            one.process.stop()


def _two_hundred(fleet: Fleet, prefill: Lmdeploy, decode: Lmdeploy) -> None:
    router = fleet.router(prefill, decode)
    bodies = [_text(20 + 9 * index, index) for index in range(20)]
    expected = [_said(http(decode.url + "/v1/completions", body, seconds=120)) for body in bodies]
    assert len(set(expected)) == len(bodies)
    there = threading.Event()
    there.set()
    ends: Counter[int] = Counter()

    def one(number: int) -> int:
        if number == 100:
            there.clear()
            decode.kill()
            decode.process.stop()
            decode.process = lmdeploy_engine.again(fleet, decode)
            fleet.start(decode)
            there.set()
        assert there.wait(200)
        dice = random.Random(number)
        index = number % len(bodies)
        if dice.random() < 0.2:
            _leave(router, bodies[index], dice.uniform(0, 1))
            return 0
        answer = http(router + "/v1/completions", bodies[index], seconds=120)
        if answer.status == 200:
            assert _said(answer) == expected[index], number
        else:
            assert answer.status >= 500, answer.data
            assert answer.error["code"], answer.data
        return answer.status

    with ThreadPoolExecutor(16) as pool:
        statuses = list(pool.map(one, range(200), timeout=500))
    ends.update(statuses)
    print(f"ends: {dict(ends)}")
    assert ends[200] >= 110, ends
    assert ends[0] >= 20, ends
    assert set(statuses[:80]) <= {0, 200}, statuses
    quiet(prefill, decode, seconds=35)
    end = time.monotonic() + 20
    while (answer := http(router + "/v1/completions", bodies[0])).status != 200 and time.monotonic() < end:
        time.sleep(0.5)
    assert _said(answer) == expected[0]
    quiet(prefill, decode)


def _decoded_by_lmdeploy(lmdeploy: Engines, prefill: Running, own: float, matrix: Matrix) -> None:
    """vLLM does not tell the log-probability of the first token, without which those of the others are refused; there
    each token is at most as far below the likeliest as two can be that are each so far from what is said of them."""
    told = prefill.engine.name.startswith(("lmdeploy", "sglang"))
    answers = _hand_over(prefill, lmdeploy.decode, **({"return_logprob": True} if told else {}))
    apart = 0.0
    for words, answer in answers:
        whole, best = lmdeploy.alone.scores(words + _ids(answer), len(words))
        if told:
            apart = max(
                apart, _apart([float(value) for value, _ in answer["choices"][0]["output_token_logprobs"]], whole)
            )
        else:
            apart = max(apart, _apart(best, whole) / 2)
    _near(apart, own)
    matrix.record(prefill.contract, lmdeploy.decode.contract, "exact")


def _apart(some: list[float], others: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(some, others, strict=True))


def _near(apart: float, own: float) -> None:
    print(f"log-probabilities: apart {apart:.3f}, own {own:.3f}")
    assert apart <= 2 * own, (apart, own)


def _hand_over(
    prefill: Running,
    decode: Running,
    lengths: tuple[int, ...] = LENGTHS,
    *,
    tokens: int = TOKENS,
    seed: int | None = None,
    **more: Any,
) -> list[tuple[list[int], Any]]:
    """A prompt of each length and its answer, one at a time: in 16 bits a product is rounded in another way when others
    are computed with it. Every byte was verified, and nothing is held after."""
    base = 1000 * next(_SEEDS) if seed is None else seed
    found = []
    for length in lengths:
        words = prompt(length, seed=base + length)
        name, ticket = ticketed(prefill, decode, 120)
        for engine, side, count in ((prefill, "produce", 1), (decode, "consume", tokens)):
            params = {"kv_transfer_params": {"deeplink": {"side": side, "ticket": ticket}}}
            answer = _ask(engine, words, count, **params, **more)
            assert answer.status == 200, answer.data
        ours, theirs = records(prefill, decode, name)
        assert ours["digest"] == theirs["digest"] != "", length
        found.append((words, answer.json))
    quiet(prefill, decode)
    return found


def _ask(engine: Running, words: list[int], tokens: int, **more: Any) -> Answer:
    if isinstance(engine, Lmdeploy):
        return http(engine.url + "/v1/chat/completions", engine.body(words, tokens, **more), seconds=120)
    if more.pop("return_logprob", False):
        more["logprobs"] = 1
    return http(engine.url + "/v1/completions", completion(words, tokens, **more), seconds=120)


def _ids(answer: Any) -> list[int]:
    ids: list[int] = answer["choices"][0]["output_ids"]
    return ids


def _forced(engine: Running, words: list[int], forced: list[int], salt: str) -> list[float]:
    """The log-probability of each of the forced tokens after the ones before. The cache under `salt` is used."""
    return [_vllm(engine, words + forced[:at], salt, token) for at, token in enumerate(forced)]


def _vllm(engine: Running, words: list[int], salt: str, token: int | None = None) -> float:
    more: dict[str, Any] = {"cache_salt": salt} if salt else {}
    if token is not None:
        more["allowed_token_ids"] = [token]
    answer = http(engine.url + "/v1/completions", completion(words, 1, logprobs=1, **more))
    assert answer.status == 200, answer.data
    value: float = answer.json["choices"][0]["logprobs"]["token_logprobs"][0]
    return value


def _sglang(engine: Running, ids: list[int], start: int) -> list[float]:
    """The log-probability of each token from `start` on, after those before it."""
    asked = {"input_ids": ids, "return_logprob": True, "logprob_start_len": start - 1}
    answer = http(engine.url + "/generate", {**asked, "sampling_params": {"max_new_tokens": 1, "temperature": 0}})
    assert answer.status == 200, answer.data
    told = answer.json["meta_info"]["input_token_logprobs"][start - len(ids) :]
    assert [token for _, token, *_ in told] == ids[start:]
    return [float(value) for value, *_ in told]


def _text(words: int, seed: int) -> dict[str, Any]:
    dice = random.Random(seed)
    text = " ".join(f"w{dice.randrange(3, 1000)}" for _ in range(words))
    return {"model": SERVED, "prompt": text, "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def _said(answer: Answer) -> str:
    assert answer.status == 200, answer.data
    text: str = answer.json["choices"][0]["text"]
    return text


def _leave(url: str, body: dict[str, Any], seconds: float) -> None:
    """Send a request, and go away after a while."""
    connection = HTTPConnection(urlsplit(url).netloc, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    time.sleep(seconds)
    connection.close()
