"""An engine with two data-parallel replicas behind one API: each is an engine of its own, at one address."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fleet import Fleet, Running, claim, completion, exact, prompt, quiet

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def engines(fleet: Fleet) -> Iterator[tuple[Running, Running]]:
    """Two replicas, and one."""
    more = {"model": fleet.tiny("four-heads"), "kv_mib": 64}
    flags = ("--data-parallel-size", "2")
    two = fleet.prepare("replicas", "both", worker=True, block_size=64, flags=flags, **more)
    one = fleet.prepare("whole", "both", block_size=128, **more)
    fleet.start(two, one)
    yield two, one
    two.process.stop()
    one.process.stop()


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
