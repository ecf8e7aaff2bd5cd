"""An engine whose ranks are on several hosts: here two groups of processes on one, each with an address of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fleet import Fleet, Running, completion, exact, http, prompt, quiet

from deeplink.local import engines

pytestmark = pytest.mark.long

SECOND = "127.0.0.2"
"""Where peers reach what is on the second host."""


@dataclass(frozen=True)
class Spread:
    """`first` serves; `second` has the other rank, and no API. `other` is an engine of one host."""

    first: Running
    second: Running
    other: Running
    router: str


def settings(fleet: Fleet, host: str) -> Path:
    path = fleet.folder / f"at-{host}.toml"
    path.write_text(f'[kv]\nhost = "{host}"\n')
    return path


@pytest.fixture(scope="module")
def spread(fleet: Fleet) -> Iterator[Spread]:
    (master,) = engines.free_ports(1)
    more = {"model": fleet.tiny("four-heads"), "kv_mib": 64}
    nodes = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(master))
    both = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp", *nodes)
    first = fleet.prepare("node-0", "both", block_size=64, flags=(*both, "--node-rank", "0"), **more)
    second = fleet.prepare(
        "node-1",
        "both",
        block_size=64,
        flags=(*both, "--node-rank", "1", "--headless"),
        config=settings(fleet, SECOND),
        **more,
    )
    other = fleet.prepare("one-host", "both", block_size=128, **more)
    second.process.start()
    try:
        fleet.start(first, other)
        yield Spread(first, second, other, fleet.router(first, other, deadline=20.0))
    finally:
        for one in (second, first, other):
            one.process.stop()


def test_peers_reach_each_rank_where_it_is(spread: Spread) -> None:
    hosts = [rank.channel.rpartition(":")[0] for rank in spread.first.contract.ranks]
    assert hosts == ["127.0.0.1", SECOND]


@pytest.mark.parametrize("tokens", [5, 65, 130, 900])
def test_from_two_hosts_to_one(spread: Spread, tokens: int) -> None:
    exact(spread.first, spread.other, tokens, seed=80_000 + tokens)


@pytest.mark.parametrize("tokens", [5, 65, 130, 900])
def test_from_one_host_to_two(spread: Spread, tokens: int) -> None:
    exact(spread.other, spread.first, tokens, seed=81_000 + tokens)


def test_when_the_second_host_is_lost(spread: Spread) -> None:
    """The last: nothing of the engine serves after it. A request ends all the same, and its peer holds nothing."""
    spread.second.kill()
    answer = http(spread.router + "/v1/completions", completion(prompt(200, seed=82_000), 8), seconds=60)
    assert answer.status == 200 or answer.status >= 500, answer.data
    quiet(spread.other, seconds=25)
