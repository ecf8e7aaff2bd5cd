"""An engine with two data-parallel replicas behind one API: each is an engine of its own, at one address."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from fleet import Fleet, Running, claim, completion, exact, http, prompt, quiet, token_ids

from deeplink.local.engines import free_ports

pytestmark = pytest.mark.long

KEY = "the key of an operator of replicas"


@pytest.fixture(scope="module")
def registry() -> int:
    """The port of a router that is not there until the last test."""
    return free_ports(1)[0]


@pytest.fixture(scope="module")
def engines(fleet: Fleet, registry: int) -> Iterator[tuple[Running, Running]]:
    """Two replicas, which register, and one, which does not."""
    more = {"model": fleet.tiny("four-heads"), "kv_mib": 64}
    flags = ("--data-parallel-size", "2", "--deeplink-router", f"http://127.0.0.1:{registry}")
    two = fleet.prepare("replicas", "both", worker=True, block_size=64, flags=flags, **more)
    one = fleet.prepare("whole", "both", block_size=128, **more)
    with fleet.running(two, one):
        yield two, one


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


def test_a_claim_at_the_wrong_replica_is_refused_by_name(engines: tuple[Running, Running]) -> None:
    """As when whoever asks does not say which is meant, and vLLM chooses."""
    ours, theirs, one = engines[0].replica(0), engines[0].replica(1), engines[1]
    body = completion(prompt(200, seed=71_000), 8)
    strayed = engines[0].replica(0)
    strayed.headers = theirs.headers
    answer, name = claim(one, strayed, body)
    assert answer.status == 500
    assert theirs.handoff(name)["reason"]["field"] == "epoch"
    quiet(ours, theirs)


def test_each_registers_is_asked_and_takes_leave(fleet: Fleet, engines: tuple[Running, Running], registry: int) -> None:
    """The last one here, for it stops them."""
    two = engines[0]
    replicas = [two.replica(rank) for rank in (0, 1)]
    router = fleet.registry_router(KEY, registry)
    names = [f"{two.url.removeprefix('http://')}/{rank}" for rank in (0, 1)]
    end = time.monotonic() + 30
    while True:
        found = fleet.registered(router, KEY)
        if [name for name in names if found.get(name, {}).get("up")] == names:
            break
        assert time.monotonic() < end, found
        time.sleep(0.1)
    assert sorted(found) == names
    for name, replica in zip(names, replicas, strict=True):
        assert (found[name]["url"], found[name]["control"]) == (two.url, replica.control_url)
        assert found[name]["epoch"] == replica.contract.epoch

    def answered() -> list[float]:
        return [two.metric("vllm:request_success_total", f'engine="{rank}"') for rank in (0, 1)]

    before = answered()
    for index in range(6):
        body = completion(prompt(50, seed=72_000 + index), 8)
        answer = http(router + "/v1/completions", body)
        assert answer.status == 200, answer.data
        assert token_ids(answer.json) == token_ids(engines[1].alone(body))
    asked = [now - then for then, now in zip(before, answered(), strict=True)]
    assert min(asked) > 0, f"the router does not ask both: {asked}"
    two.process.stop()
    end = time.monotonic() + 20
    while found := fleet.registered(router, KEY):
        assert time.monotonic() < end, found
        time.sleep(0.1)
