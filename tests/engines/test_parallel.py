"""Engines of unlike tensor-parallel sizes, and a model whose layers do not all keep the same tokens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fleet import Fleet, Running, exact
from matrix import Matrix

LENGTHS = [1, 5, 64, 65, 130, 300, 900]


@pytest.fixture(scope="module", params=["four-heads", "one-head"])
def unequal(request: pytest.FixtureRequest, fleet: Fleet) -> Iterator[tuple[Running, Running]]:
    """One rank and two; with one KV head each of the two has a copy of it."""
    model = fleet.tiny(str(request.param))
    one = fleet.prepare(f"{request.param}-tp1", "both", model=model, block_size=64, kv_mib=64)
    two = fleet.prepare(
        f"{request.param}-tp2", "both", model=model, block_size=128, kv_mib=64, flags=("--tensor-parallel-size", "2")
    )
    with fleet.running(one, two):
        yield one, two


@pytest.mark.parametrize("tokens", LENGTHS)
def test_one_rank_to_two(unequal: tuple[Running, Running], matrix: Matrix, tokens: int) -> None:
    exact(*unequal, tokens, seed=1000 + tokens)
    matrix.record(unequal[0].contract, unequal[1].contract, "exact")


@pytest.mark.parametrize("tokens", LENGTHS)
def test_two_ranks_to_one(unequal: tuple[Running, Running], matrix: Matrix, tokens: int) -> None:
    exact(*reversed(unequal), tokens, seed=2000 + tokens)  # type: ignore[call-arg, arg-type]
    matrix.record(unequal[1].contract, unequal[0].contract, "exact")


@pytest.fixture(scope="module")
def hybrid(fleet: Fleet) -> Iterator[tuple[Running, Running]]:
    """Two layers of three see 64 tokens, the third sees all."""
    model = fleet.tiny("hybrid")
    prefill = fleet.prepare("hybrid-64", "prefill", model=model, block_size=64, kv_mib=64)
    decode = fleet.prepare("hybrid-128", "decode", model=model, block_size=128, kv_mib=64)
    with fleet.running(prefill, decode):
        yield prefill, decode


@pytest.mark.parametrize("tokens", LENGTHS)
def test_sliding_windows_beside_full_attention(hybrid: tuple[Running, Running], matrix: Matrix, tokens: int) -> None:
    assert {group.kind for group in hybrid[0].contract.groups} == {"sliding", "full"}
    exact(*hybrid, tokens, seed=3000 + tokens)
    matrix.record(hybrid[0].contract, hybrid[1].contract, "exact")
