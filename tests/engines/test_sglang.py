"""SGLang as prefill and as decode engine, with pages that are unlike."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import load
import openai
import pytest
import sglang_engine
from fleet import SERVED, Answer, Fleet, Running, completion, events, http, prompt, quiet, records, token_ids
from matrix import Matrix

from deeplink import secret
from deeplink.kvconnector.contracts.negotiate import Agreement, negotiate
from deeplink.kvconnector.handoffs import ticket as tickets

_SEEDS = itertools.count(1)
LENGTHS = [5, 16, 17, 64, 65, 200, 500, 900]


@dataclass(frozen=True)
class Engines:
    """A prefill engine with pages of 16 tokens, a decode engine with pages of 64, and one like it that serves alone."""

    fleet: Fleet
    prefill: Running
    decode: Running
    alone: Running
    router: str


@pytest.fixture(scope="module")
def sglang(fleet: Fleet) -> Iterator[Engines]:
    prefill = sglang_engine.prepare(fleet, "sglang-prefill", "prefill", page=16)
    decode = sglang_engine.prepare(fleet, "sglang-decode", "decode", page=64)
    alone = sglang_engine.prepare(fleet, "sglang-alone", "", page=64)
    fleet.start(prefill, decode, alone)
    yield Engines(fleet, prefill, decode, alone, fleet.router(prefill, decode))
    for one in (prefill, decode, alone):
        one.process.stop()


def test_page_16_to_64_gives_the_decode_engines_own_tokens(sglang: Engines, matrix: Matrix) -> None:
    """With SGLang's own transfer backends a decode engine with another page size than the prefill engine's dies."""
    _exact(sglang, sglang.prefill, sglang.decode, sglang.alone, matrix)


@pytest.fixture(scope="module")
def vllm(fleet: Fleet) -> Iterator[tuple[Running, Running]]:
    """A prefill engine with blocks of 32 tokens, and a decode engine with blocks of 128."""
    made = (
        fleet.prepare("vllm-prefill", "prefill", block_size=32),
        fleet.prepare("vllm-decode", "decode", block_size=128),
    )
    fleet.start(*made)
    yield made
    for one in made:
        one.process.stop()


@pytest.mark.long
def test_from_vllm_to_sglang(sglang: Engines, vllm: tuple[Running, Running], matrix: Matrix) -> None:
    """vLLM samples the first token when its blocks are staged already; SGLang goes on from it."""
    _exact(sglang, vllm[0], sglang.decode, sglang.alone, matrix)


@pytest.mark.long
def test_from_sglang_to_vllm(sglang: Engines, vllm: tuple[Running, Running], matrix: Matrix) -> None:
    """vLLM computes the last token of the prompt itself."""
    _exact(sglang, sglang.prefill, vllm[1], vllm[1], matrix)


def test_what_prefill_has_cached_is_handed_over_too(sglang: Engines) -> None:
    """SGLang reports cached pages before it computes the others."""
    shared = prompt(300, seed=31)
    for seed in (32, 33):
        body = completion(shared + prompt(100, seed=seed), 16)
        answer = http(sglang.router + "/v1/completions", body)
        assert answer.status == 200, answer.data
        assert token_ids(answer.json) == token_ids(sglang.alone.alone(body))
    quiet(sglang.prefill, sglang.decode)


def test_many_at_once(sglang: Engines) -> None:
    bodies = [completion(prompt(40 + 53 * index, seed=100 + index), 16) for index in range(12)]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda body: http(sglang.router + "/v1/completions", body, seconds=120), bodies))
    assert [answer.status for answer in answers] == [200] * len(bodies)
    for body, answer in zip(bodies, answers, strict=True):
        assert token_ids(answer.json) == token_ids(sglang.alone.alone(body))
    quiet(sglang.prefill, sglang.decode)


def test_log_probabilities_of_the_first_token_come_with_it(sglang: Engines) -> None:
    body = completion(prompt(50, seed=7), 4, logprobs=3)
    answer = http(sglang.router + "/v1/completions", body)
    assert answer.status == 200, answer.data
    ours, alone = answer.json["choices"][0]["logprobs"], sglang.alone.alone(body)["choices"][0]["logprobs"]
    assert ours["token_logprobs"] == pytest.approx(alone["token_logprobs"], abs=1e-3)
    assert [list(top) for top in ours["top_logprobs"]] == [list(top) for top in alone["top_logprobs"]]


def test_the_openai_sdk_streams_a_chat(sglang: Engines) -> None:
    fields: dict[str, Any] = {
        "model": SERVED,
        "messages": [{"role": "user", "content": "Name three rivers."}],
        "max_tokens": 24,
        "temperature": 0,
    }
    with openai.OpenAI(base_url=sglang.router + "/v1", api_key="none", timeout=60, max_retries=0) as client:
        stream = client.chat.completions.create(**fields, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    alone = sglang.alone.alone(fields, "/v1/chat/completions")
    assert text == alone["choices"][0]["message"]["content"] != ""
    quiet(sglang.prefill, sglang.decode)


def test_sglangs_own_endpoint(sglang: Engines) -> None:
    """With a ticket that is minted here, as the router does not know this endpoint."""
    ours, theirs = sglang.prefill.contract, sglang.decode.contract
    agreement = negotiate(ours, theirs)
    assert isinstance(agreement, Agreement), agreement
    ticket = tickets.mint(tickets.issue(tickets.new_handoff(), ours, theirs, agreement, 30_000), secret.load())
    body = _native(prompt(70, seed=9))
    for engine, side in ((sglang.prefill, "produce"), (sglang.decode, "consume")):
        fields = {"kv_transfer_params": {"deeplink": {"side": side, "ticket": ticket}}}
        answer = http(engine.url + "/generate", {**body, **fields})
        assert answer.status == 200, answer.data
    assert answer.json["output_ids"] == sglang.alone.alone(body, "/generate")["output_ids"]
    quiet(sglang.prefill, sglang.decode)


def _native(ids: list[int]) -> dict[str, Any]:
    sampling = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
    return {"input_ids": ids, "sampling_params": sampling}


def test_a_request_without_a_ticket_ends_alone(sglang: Engines) -> None:
    """Straight to the engines, past the router: an error for this request, and the engines go on."""
    forged = {"kv_transfer_params": {"deeplink": {"side": "consume", "ticket": "x"}}}
    own = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 17}
    for fields in (forged, own, {"bootstrap_room": 17}, {}):
        for engine in (sglang.prefill, sglang.decode):
            answer = http(engine.url + "/v1/completions", {**completion(prompt(30, seed=52), 4), **fields})
            assert answer.status in (400, 500), answer.data
    quiet(sglang.prefill, sglang.decode)
    _works(sglang)


@pytest.mark.parametrize("asked", [0, 1, 12])
def test_a_client_leaves(sglang: Engines, asked: int) -> None:
    """Before the answer begins, at its first token, and in its midst."""
    body = completion(prompt(900, seed=60 + asked), 64, stream=True)
    if asked == 0:
        with ThreadPoolExecutor(1) as pool, pytest.raises(TimeoutError):
            pool.submit(http, sglang.router + "/v1/completions", body, seconds=0.3).result(5)
    else:
        stream = events(sglang.router + "/v1/completions", body)
        for _ in range(asked):
            next(stream)
        stream.close()  # type: ignore[attr-defined]
    quiet(sglang.prefill, sglang.decode, seconds=15)
    _works(sglang)


def test_both_engines_at_once(sglang: Engines) -> None:
    """The decode engine claims before prefill has begun."""
    router = sglang.fleet.router(sglang.prefill, sglang.decode, dispatch="together")
    for tokens in (5, 300):
        body = completion(prompt(tokens, seed=700 + tokens), 16)
        answer = http(router + "/v1/completions", body)
        assert answer.status == 200, answer.data
        assert token_ids(answer.json) == token_ids(sglang.alone.alone(body))
    quiet(sglang.prefill, sglang.decode)


@pytest.mark.parametrize("field", ["n", "best_of"])
def test_what_is_not_handed_over_is_served_by_nobody(sglang: Engines, field: str) -> None:
    answer = http(sglang.router + "/v1/completions", completion(prompt(20, seed=80), 4, **{field: 2}))
    assert answer.status == 503, answer.data
    assert answer.error["code"] == "no_engine"


@pytest.mark.long
def test_a_handoff_nobody_fetches_ends_at_its_deadline(sglang: Engines) -> None:
    router = sglang.fleet.router(sglang.prefill, sglang.decode, deadline=3)
    sglang.decode.process.stop()
    try:
        answer = http(router + "/v1/completions", completion(prompt(100, seed=70), 4))
        assert answer.status in (502, 503, 504), answer.data
        quiet(sglang.prefill, seconds=6)
    finally:
        sglang.fleet.restart(sglang.decode)
    _works(sglang, seconds=15)


@pytest.mark.long
def test_page_16_to_1(sglang: Engines, matrix: Matrix) -> None:
    """The decode engine has a prefix cache, too: of a prompt that it knows only the last token is fetched."""
    cached = ("--disaggregation-decode-enable-radix-cache",)
    single = sglang_engine.prepare(sglang.fleet, "sglang-single", "decode", page=1, flags=cached)
    sglang.fleet.start(single)
    try:
        seed = _exact(sglang, sglang.prefill, single, sglang.alone, matrix)
        router = sglang.fleet.router(sglang.prefill, single)
        for tokens in LENGTHS:
            again = http(router + "/v1/completions", _prompts(seed)[tokens])
            assert again.status == 200, again.data
            _, theirs = records(sglang.prefill, single, again.headers["x-deeplink-handoff"])
            assert int(str(theirs["tokens"])) < tokens
        quiet(sglang.prefill, single)
    finally:
        single.process.stop()


@pytest.mark.long
def test_other_weights_and_other_types_are_refused_by_name(sglang: Engines, matrix: Matrix) -> None:
    """SGLang's own backends accept both and answer with wrong tokens."""
    fleet = sglang.fleet
    weights = sglang_engine.prepare(fleet, "sglang-weights", "prefill", page=16, model=fleet.variant())
    bfloat16 = sglang_engine.prepare(fleet, "sglang-bf16", "prefill", page=16, dtype="bfloat16")
    float16 = sglang_engine.prepare(fleet, "sglang-fp16", "decode", page=64, dtype="float16")
    fleet.start(weights, bfloat16, float16)
    try:
        for prefill, decode, field in (
            (weights, sglang.decode, "model.weights"),
            (bfloat16, float16, "groups[0].dtype"),
        ):
            ended = prefill.control("/v1/status").json["ended"]
            answer = http(fleet.router(prefill, decode) + "/v1/completions", completion(prompt(100, seed=1)))
            assert answer.status == 503, answer.data
            assert answer.error["code"] == "contract_refused"
            assert answer.error["field"] == field
            assert prefill.control("/v1/status").json["ended"] == ended
            quiet(prefill, decode)
        matrix.record(bfloat16.contract, float16.contract, "refused (groups[0].dtype)")
        _works(sglang)
    finally:
        for one in (weights, bfloat16, float16):
            one.process.stop()


@pytest.mark.long
def test_an_engine_that_other_weights_were_loaded_into_hands_nothing_over(sglang: Engines) -> None:
    """Its contract is of those that it was started with."""
    fleet = sglang.fleet
    changing = sglang_engine.prepare(fleet, "sglang-changing", "prefill", page=16)
    fleet.start(changing)
    try:
        router = fleet.router(changing, sglang.decode, deadline=15)
        body = completion(prompt(100, seed=2))
        first = http(router + "/v1/completions", body)
        assert first.status == 200, first.data
        assert first.headers["x-deeplink-path"].startswith("handoff"), first.headers
        other = {"model_path": str(fleet.variant()), "flush_cache": True}
        loaded = http(changing.url + "/update_weights_from_disk", other, seconds=120)
        assert loaded.status == 200, loaded.data
        again = http(router + "/v1/completions", body)
        assert again.status >= 500, again.data
        assert again.error["code"], again.data
        quiet(sglang.decode)
        _works(sglang)
    finally:
        changing.process.stop()


@pytest.mark.long
def test_two_hundred_requests(sglang: Engines) -> None:
    ends, wrong = load.run(sglang.fleet, sglang.prefill, sglang.decode, sglang.alone, sglang.router)
    assert not wrong
    assert ends.total() == load.REQUESTS
    assert ends["left"] > 0.1 * load.REQUESTS, ends
    assert ends["answered"] > 0.6 * load.REQUESTS, ends
    _works(sglang)


def _prompts(seed: int) -> dict[int, dict[str, Any]]:
    return {tokens: completion(prompt(tokens, seed=seed + tokens)) for tokens in LENGTHS}


def _exact(sglang: Engines, prefill: Running, decode: Running, alone: Running, matrix: Matrix) -> int:
    """All lengths, some at a time: the tokens are those of the decode engine alone, and nothing is held after. Returns
    the prompts' seed."""
    seed = 1000 * next(_SEEDS)
    router = sglang.fleet.router(prefill, decode)
    bodies = _prompts(seed)
    with ThreadPoolExecutor(4) as pool:
        answers = dict(zip(bodies, pool.map(lambda body: _ask(router, body), bodies.values()), strict=True))
        expected = dict(zip(bodies, pool.map(alone.alone, bodies.values()), strict=True))
    for tokens, answer in answers.items():
        assert answer.status == 200, answer.data
        assert answer.headers["x-deeplink-path"] == "handoff"
        ours, theirs = records(prefill, decode, answer.headers["x-deeplink-handoff"])
        assert ours["digest"] == theirs["digest"] != "", tokens
        assert token_ids(answer.json) == token_ids(expected[tokens]), tokens
    quiet(prefill, decode)
    matrix.record(prefill.contract, decode.contract, "exact")
    return seed


def _ask(router: str, body: dict[str, Any]) -> Answer:
    return http(router + "/v1/completions", body, seconds=120)


def _works(sglang: Engines, seconds: float = 0) -> None:
    """The engines serve one more request, at the latest after `seconds`: the router looks for them now and then."""
    body = completion(prompt(40, seed=time.time_ns() % 100000), 4)
    end = time.monotonic() + seconds
    while (answer := http(sglang.router + "/v1/completions", body)).status != 200 and time.monotonic() < end:
        time.sleep(0.5)
    assert answer.status == 200, answer.data
    assert token_ids(answer.json) == token_ids(sglang.alone.alone(body))
    quiet(sglang.prefill, sglang.decode)
