"""An engine with two data-parallel replicas behind one API: each is an engine of its own, at one address."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from fleet import Fleet, Running, claim, completion, hand_over, http, prompt, quiet, token_ids

from deeplink.local.engines import free_ports

pytestmark = pytest.mark.long

KEY = "operator-of-replicas"


@pytest.fixture(scope="module")
def registry() -> int:
    """The port of a router that is started later."""
    return free_ports(1)[0]


@pytest.fixture(scope="module")
def engines(fleet: Fleet, registry: int) -> Iterator[tuple[Running, Running]]:
    """Two replicas, which register, and one."""
    more = {"model": fleet.tiny("four-heads"), "kv_mib": 64}
    flags = ("--data-parallel-size", "2", "--deeplink-router", f"http://127.0.0.1:{registry}")
    two = fleet.prepare("replicas", "both", worker=True, block_size=64, flags=flags, **more)
    one = fleet.prepare("whole", "both", block_size=128, **more)
    fleet.start(two, one)
    yield two, one
    two.process.stop()
    one.process.stop()


def exact(prefill: Running, decode: Running, tokens: int, seed: int) -> None:
    body = completion(prompt(tokens, seed=seed), 32)
    before = decode.loaded_tokens
    answer, name = hand_over(prefill, decode, body)
    assert decode.loaded_tokens - before == tokens - 1
    assert token_ids(answer) == token_ids(decode.alone(body))
    quiet(prefill, decode)
    assert (prefill.handoff(name)["state"], decode.handoff(name)["state"]) == ("drained", "loaded")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("tokens", [5, 130, 900])
def test_one_of_two_replicas_to_one(engines: tuple[Running, Running], rank: int, tokens: int) -> None:
    exact(engines[0].replica(rank), engines[1], tokens, seed=50_000 + 1000 * rank + tokens)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("tokens", [5, 130, 900])
def test_one_to_one_of_two_replicas(engines: tuple[Running, Running], rank: int, tokens: int) -> None:
    exact(engines[1], engines[0].replica(rank), tokens, seed=60_000 + 1000 * rank + tokens)


def test_from_one_replica_to_its_sibling(engines: tuple[Running, Running]) -> None:
    """As between any two engines: nothing else is shared."""
    ours, theirs = engines[0].replica(0), engines[0].replica(1)
    assert ours.contract.epoch != theirs.contract.epoch
    assert [rank.dp for replica in (ours, theirs) for rank in replica.contract.ranks] == [0, 1]
    exact(ours, theirs, 300, seed=70_000)


def test_a_ticket_at_the_wrong_replica_fails(engines: tuple[Running, Running]) -> None:
    """As when whoever asks does not say which is meant, and vLLM chooses. What was prefilled there nobody can name."""
    ours, theirs, one = engines[0].replica(0), engines[0].replica(1), engines[1]
    body = completion(prompt(200, seed=71_000), 8)
    strayed = engines[0].replica(0)
    strayed.headers = theirs.headers
    answer, name = claim(one, strayed, body)
    assert answer.status == 500
    assert theirs.handoff(name)["reason"]["field"] == "epoch"
    answer, name = claim(strayed, one, body, seconds=4)
    assert answer.status == 500
    assert one.handoff(name)["reason"]["code"] == "deadline_exceeded"
    quiet(ours, theirs, seconds=5)


def test_each_registers_and_is_asked(fleet: Fleet, engines: tuple[Running, Running], registry: int) -> None:
    """The router names the replica in each request, so both get some."""
    router = fleet.registry_router(KEY, registry)
    end = time.monotonic() + 30
    while len(known := http(f"{router}/deeplink/v1/engines", token=KEY).json["engines"]) < 2:
        assert time.monotonic() < end, known
        time.sleep(0.2)
    host = engines[0].url.partition("://")[2]
    assert {engine["name"] for engine in known} == {f"{host}/0", f"{host}/1"}
    for index in range(6):
        answer = http(router + "/v1/completions", completion(prompt(50, seed=72_000 + index), 4))
        assert answer.status == 200, answer.data
    for rank in (0, 1):
        assert engines[0].metric("vllm:request_success_total", f'engine="{rank}"') > 0
