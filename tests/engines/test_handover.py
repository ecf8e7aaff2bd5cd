"""Prefill in one engine, decode in the other, on the KV cache that was handed over."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from fleet import SERVED, Pair, Running, completion, events, http, prompt, quiet, token_ids
from matrix import Matrix


def test_the_pair_is_unlike(pair: Pair) -> None:
    (ours,), (theirs,) = pair.prefill.contract.groups, pair.decode.contract.groups
    assert (ours.block_size, theirs.block_size) == (64, 128)
    assert ours.dtype == theirs.dtype == "float32"


@pytest.mark.parametrize("tokens", [1, 2, 17, 64, 65, 128, 129, 500, 900])
def test_block_64_to_128_gives_the_decode_engines_own_tokens(pair: Pair, matrix: Matrix, tokens: int) -> None:
    """The built-in NIXL connector accepts this pair and answers garbage with status 200."""
    body = completion(prompt(tokens, seed=tokens))
    before = pair.decode.loaded_tokens
    answer = http(pair.router + "/v1/completions", body)
    assert answer.status == 200, answer.data
    assert answer.headers["x-deeplink-path"] == "handoff"
    # The decode engine itself says how much came from outside: everything but the last prompt token.
    assert pair.decode.loaded_tokens - before == tokens - 1
    assert token_ids(answer.json) == token_ids(pair.decode.alone(body))
    name = answer.headers["x-deeplink-handoff"]
    quiet(pair.prefill, pair.decode)
    ours, theirs = pair.prefill.handoff(name), pair.decode.handoff(name)
    assert (ours["state"], theirs["state"]) == ("drained", "loaded")
    if tokens > 1:
        assert ours["digest"] == theirs["digest"] != ""
    matrix.record(pair.prefill.contract, pair.decode.contract, "exact")


def test_only_missing_tokens_move(pair: Pair) -> None:
    """A prompt whose first block the decode engine has already cached."""
    shared = prompt(300, seed=31)
    http(pair.decode.url + "/v1/completions", completion(shared, 1))
    body = completion(shared + prompt(100, seed=32))
    before = pair.decode.loaded_tokens
    answer = http(pair.router + "/v1/completions", body)
    assert answer.headers["x-deeplink-path"] == "handoff"
    assert pair.decode.loaded_tokens - before == 399 - 256  # two blocks of 128 were there
    assert token_ids(answer.json) == token_ids(pair.decode.alone(body))
    quiet(pair.prefill, pair.decode)


def test_salts_keep_caches_apart(pair: Pair) -> None:
    """Of one prompt, each salt has its own KV on both engines, and is handed over on its own."""
    body = completion(prompt(300, seed=33), 8)
    loaded = []
    for salt in ("one", "another", "one"):
        before = pair.decode.loaded_tokens
        answer = http(pair.router + "/v1/completions", {**body, "cache_salt": salt})
        assert answer.headers["x-deeplink-path"] == "handoff"
        assert token_ids(answer.json) == token_ids(pair.decode.alone(body))
        loaded.append(pair.decode.loaded_tokens - before)
    assert loaded == [299, 299, 299 - 256]
    quiet(pair.prefill, pair.decode)


def test_nothing_missing_lets_the_prefill_engine_go(pair: Pair) -> None:
    body = completion(prompt(257, seed=41), 8)
    http(pair.decode.url + "/v1/completions", body)
    before = pair.decode.loaded_tokens
    answer = http(pair.router + "/v1/completions", body)
    assert answer.status == 200
    assert pair.decode.loaded_tokens == before
    assert token_ids(answer.json) == token_ids(pair.decode.alone(body))
    quiet(pair.prefill, pair.decode)


def test_the_openai_sdk_streams_a_chat(pair: Pair) -> None:
    with openai.OpenAI(base_url=pair.router + "/v1", api_key="none", timeout=60, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [SERVED]
        stream = client.chat.completions.create(
            model=SERVED,
            messages=[{"role": "user", "content": "Name three rivers."}],
            max_tokens=24,
            temperature=0,
            stream=True,
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    body = {
        "model": SERVED,
        "messages": [{"role": "user", "content": "Name three rivers."}],
        "max_tokens": 24,
        "temperature": 0,
    }
    alone = pair.decode.alone(body, "/v1/chat/completions")
    assert text == alone["choices"][0]["message"]["content"] != ""
    quiet(pair.prefill, pair.decode)


def test_vllms_own_metrics(pair: Pair) -> None:
    """The same counts as the control endpoint's, in the engines' own /metrics."""

    def counts() -> dict[str, float]:
        ours, theirs = pair.prefill.metric, pair.decode.metric
        return {
            "drained": ours("vllm:deeplink_handoffs_total", 'side="producer",state="drained"'),
            "sent": ours("vllm:deeplink_kv_bytes_total", 'side="producer"'),
            "taking out": ours("vllm:deeplink_converting_seconds_total", 'side="producer"'),
            "loaded": theirs("vllm:deeplink_handoffs_total", 'code="",engine="0",model_name="demo",side="consumer"'),
            "received": theirs("vllm:deeplink_kv_bytes_total", 'side="consumer"'),
            "putting in": theirs("vllm:deeplink_converting_seconds_total", 'side="consumer"'),
        }

    before = counts()
    for seed in (61, 62, 63):  # the end of the last one the producer tells at its next step
        assert http(pair.router + "/v1/completions", completion(prompt(300, seed=seed), 4)).status == 200
    quiet(pair.prefill, pair.decode)
    grown = {name: value - before[name] for name, value in counts().items()}
    (group,) = pair.decode.contract.groups
    token = len(group.layers) * group.heads * group.head_dim * 2 * 4
    assert grown["loaded"] == 3
    assert 2 <= grown["drained"] <= 4
    assert grown["received"] == 3 * 300 * token  # the last token comes with its chunk
    assert grown["sent"] >= 2 * 300 * token
    assert 0 < grown["taking out"] < 10
    assert 0 < grown["putting in"] < 10
    assert pair.prefill.metric("vllm:deeplink_blocks_held") == 0
    assert pair.decode.metric("vllm:deeplink_blocks_held") == 0


def test_many_at_once(pair: Pair) -> None:
    bodies = [completion(prompt(40 + 37 * index, seed=100 + index), 16) for index in range(12)]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda body: http(pair.router + "/v1/completions", body, seconds=120), bodies))
    assert [answer.status for answer in answers] == [200] * len(bodies)
    for body, answer in zip(bodies, answers, strict=True):
        assert answer.headers["x-deeplink-path"] == "handoff"
        assert token_ids(answer.json) == token_ids(pair.decode.alone(body))
    quiet(pair.prefill, pair.decode)


def test_a_client_cannot_pass_a_ticket(pair: Pair) -> None:
    body = completion(prompt(30, seed=51), 4, kv_transfer_params={"deeplink": {"side": "consume", "ticket": "x"}})
    answer = http(pair.router + "/v1/completions", body)
    assert answer.status == 200
    assert answer.headers["x-deeplink-path"] == "handoff"
    quiet(pair.prefill, pair.decode)


def test_a_forged_ticket_is_no_answer(pair: Pair) -> None:
    """Straight to the engine, past the router: an error, never an answer from blocks that hold nothing."""
    body = completion(prompt(30, seed=52), 4, kv_transfer_params={"deeplink": {"side": "consume", "ticket": "x"}})
    assert http(pair.decode.url + "/v1/completions", body).status == 500
    quiet(pair.prefill, pair.decode)


def _preemptions(engine: Running) -> float:
    return engine.metric("vllm:num_preemptions_total")


def test_prefill_is_preempted(pair: Pair) -> None:
    """A request already decoding takes the blocks of a prefill half-way; the handoff goes on where it was.

    Of 23 blocks of 64 tokens the first request holds 8 and is about to need a ninth, while the second needs 15.
    """
    for attempt in range(6):
        before = _preemptions(pair.prefill)
        first = completion(prompt(480, seed=200 + attempt), 80, stream=True)
        second = completion(prompt(900, seed=300 + attempt), 16)
        stream = events(pair.prefill.url + "/v1/completions", first)
        for _ in range(26):
            next(stream)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(http, pair.router + "/v1/completions", second)
            assert list(stream)[-1] == "[DONE]"
            result = answer.result(60)
        assert result.status == 200, result.data
        assert result.headers["x-deeplink-path"] == "handoff"
        assert token_ids(result.json) == token_ids(pair.decode.alone(second))
        quiet(pair.prefill, pair.decode)
        if _preemptions(pair.prefill) > before:
            return
    pytest.fail("no prefill was preempted in six attempts")
