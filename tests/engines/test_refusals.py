"""What must not be handed over is refused by name, and what is damaged on the way never becomes an answer."""

from __future__ import annotations

import time

from fleet import Pair, Running, completion, http, prompt, quiet, ticketed, token_ids
from matrix import Matrix


def test_other_weights_of_the_same_shape_are_refused_by_name(
    pair: Pair, unlike: tuple[Running, Running], matrix: Matrix
) -> None:
    other, _ = unlike
    router = pair.fleet.router(other, pair.decode)
    ended = other.control("/v1/status").json["ended"]
    began = time.monotonic()
    answer = http(router + "/v1/completions", completion(prompt(100, seed=1)))
    assert time.monotonic() - began < 2
    assert answer.status == 503
    assert answer.error["code"] == "contract_refused"
    assert answer.error["field"] == "model.weights"
    for side in (other, pair.decode):
        assert side.contract.model.weights in answer.error["message"]
    assert other.control("/v1/status").json["ended"] == ended
    quiet(other, pair.decode, seconds=0.5)
    matrix.record(other.contract, pair.decode.contract, f"refused ({answer.error['field']})")


def test_another_salt_is_refused_by_name(pair: Pair) -> None:
    """The two engines are given unlike requests for one ticket: what a router never does, and a faulty one might."""
    name, ticket = ticketed(pair.prefill, pair.decode)
    statuses = []
    for running, side, tokens, salt in ((pair.prefill, "produce", 1, "a"), (pair.decode, "consume", 4, "b")):
        parameters = {"kv_transfer_params": {"deeplink": {"side": side, "ticket": ticket}}, "cache_salt": salt}
        body = {**completion(prompt(100, seed=3), tokens), **parameters}
        statuses.append(http(running.url + "/v1/completions", body).status)
    assert statuses == [200, 500]
    for running in (pair.prefill, pair.decode):
        found = running.handoff(name)
        assert (found["state"], found["reason"]["field"]) == ("failed", "cache_salt")
    quiet(pair.prefill, pair.decode)


def test_damage_on_the_way_is_an_error(pair: Pair) -> None:
    body = completion(prompt(200, seed=2))
    pair.fleet.fault.write_text("flip")
    try:
        answer = http(pair.router + "/v1/completions", body)
    finally:
        pair.fleet.fault.write_text("")
    assert answer.status == 502
    assert answer.error["code"] == "digest_mismatch"
    assert "layer 0, k, head 0" in answer.error["message"]
    quiet(pair.prefill, pair.decode)
    assert token_ids(http(pair.router + "/v1/completions", body).json) == token_ids(pair.decode.alone(body))


def test_zeroed_v_is_an_error_with_the_digest_and_another_answer_without(
    pair: Pair, unlike: tuple[Running, Running]
) -> None:
    """This test can fail: it shows that the comparison of tokens sees a cache that is not right."""
    _, careless = unlike
    without = pair.fleet.router(pair.prefill, careless)
    pair.fleet.fault.write_text("zero-v")
    try:
        body = completion(prompt(200, seed=3))
        answer = http(without + "/v1/completions", body)
        assert answer.status == 200
        assert answer.headers["x-deeplink-path"] == "handoff"
        assert token_ids(answer.json) != token_ids(careless.alone(body))
        body = completion(prompt(200, seed=4), stream=True)
        answer = http(pair.router + "/v1/completions", body)
        assert answer.status == 502
        assert answer.error["code"] == "digest_mismatch"
    finally:
        pair.fleet.fault.write_text("")
    quiet(pair.prefill, pair.decode, careless)
