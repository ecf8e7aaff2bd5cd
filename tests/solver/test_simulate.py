"""The simulator against queueing theory, and nothing lost in it."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deeplink.solver.fleet import Request
from deeplink.solver.queueing import erlang_c, wait
from deeplink.solver.simulate import Group, Way, simulate

TOKEN = 1e-6


def poisson(count: int, rate: float, service: float, *, exponential: bool, seed: int = 1) -> list[Request]:
    draw = random.Random(seed)
    at, made = 0.0, []
    for _ in range(count):
        at += draw.expovariate(rate)
        seconds = draw.expovariate(1 / service) if exponential else service
        made.append(Request(at, max(round(seconds / TOKEN), 1), 1))
    return made


def only(request: Request) -> int:
    return 0


def queue(requests: list[Request], servers: int) -> list[float]:
    group = Group(name="queue", role="both", count=servers, prefill=lambda tokens: tokens * TOKEN)
    result = simulate(requests, [group], [[Way(0, 0, 1.0)]], only, policy="shared")
    return result.first


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_m_m_1(load: float) -> None:
    times = queue(poisson(150_000, load, 1.0, exponential=True), 1)
    assert sum(times) / len(times) == pytest.approx(1 / (1 - load), rel=0.05)


@pytest.mark.parametrize("load", [0.5, 0.7])
def test_m_d_1(load: float) -> None:
    """Pollaczek and Khinchine."""
    times = queue(poisson(150_000, load, 1.0, exponential=False), 1)
    assert sum(times) / len(times) == pytest.approx(1 + load / (2 * (1 - load)), rel=0.03)


@pytest.mark.parametrize(("servers", "load"), [(2, 0.7), (4, 0.8), (16, 0.9)])
def test_m_m_k(servers: int, load: float) -> None:
    times = queue(poisson(200_000, load * servers, 1.0, exponential=True), servers)
    wanted = 1 + erlang_c(servers, load) / (servers * (1 - load))
    assert sum(times) / len(times) == pytest.approx(wanted, rel=0.04)


@pytest.mark.parametrize(("servers", "load"), [(4, 0.8), (8, 0.85)])
def test_m_d_k(servers: int, load: float) -> None:
    """Waiting about half as long as with random service (Cosmetatos; within a few parts in a hundred)."""
    times = queue(poisson(200_000, load * servers, 1.0, exponential=False), servers)
    random_service = erlang_c(servers, load) / (servers * (1 - load))
    correction = 1 + (1 - load) * (servers - 1) * (math.sqrt(4 + 5 * servers) - 2) / (16 * load * servers)
    assert sum(times) / len(times) - 1 == pytest.approx(random_service / 2 * correction, rel=0.06)


def test_the_formula_of_the_caps_agrees() -> None:
    """The wait that one in a hundred exceeds, with random service, for which it is exact."""
    times = sorted(queue(poisson(300_000, 0.8 * 4, 1.0, exponential=True, seed=3), 4))
    # The formula is of the wait alone; with service that does not vary the time is the wait plus a constant.
    waits = sorted(queue(poisson(300_000, 0.8 * 4, 1.0, exponential=False, seed=3), 4))
    assert waits[int(0.99 * len(waits))] - 1 == pytest.approx(wait(0.99, 4, 0.8, 1.0, 0.5), rel=0.15)
    assert times[len(times) // 2] < times[-1]


def engines(draw_role: str, count: int, batch: int, room: float) -> tuple[list[Group], list[list[Way]]]:
    both = Group(
        name="b",
        role="both",
        count=count,
        prefill=lambda t: t * 1e-4,
        step=(0.01, 1e-4, 1e-8),
        batch=batch,
        room=room,
        part=0.5,
    )
    prefill = Group(name="p", role="prefill", count=count, prefill=lambda t: t * 1e-4)
    decode = Group(name="d", role="decode", count=count, step=(0.01, 1e-4, 1e-8), batch=batch, room=room)
    if draw_role == "both":
        return [both], [[Way(0, 0, 1.0)]]
    return [prefill, decode], [[Way(0, 1, 1.0, 0.01, 1e-6, 0, 1e-7)]]


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.floats(0, 5), st.integers(1, 3000), st.integers(1, 200)), min_size=1, max_size=60),
    st.sampled_from(["both", "split"]),
    st.integers(1, 3),
    st.integers(1, 8),
    st.sampled_from([math.inf, 10_000.0]),
)
def test_nothing_is_lost(rows: list[tuple[float, int, int]], role: str, count: int, batch: int, room: float) -> None:
    requests = [Request(at, prompt, output) for at, prompt, output in sorted(rows)]
    groups, ways = engines(role, count, batch, room)
    result = simulate(requests, groups, ways, only, links=1)
    for request, first, further in zip(requests, result.first, result.further, strict=True):
        assert first >= request.prompt * 1e-4 * (1 - 1e-9)
        assert (further > 0) == (request.output > 1)
        if request.output > 1:
            assert further >= 0.01 * (1 - 1e-6) or role == "split"
    assert all(0 <= busy <= 1 + 1e-9 for busy in result.busy)
    assert result == simulate(requests, groups, ways, only, links=1)


def test_a_step_is_shared_by_the_batch() -> None:
    """Ten sequences at once take the time of one where a step costs the same."""
    requests = [Request(0.0, 10, 101) for _ in range(10)]
    groups = [
        Group(name="p", role="prefill", count=1, prefill=lambda t: 0.0),
        Group(name="d", role="decode", count=1, step=(0.02, 0.0, 0.0), batch=10),
    ]
    result = simulate(requests, groups, [[Way(0, 1, 1.0)]], only)
    assert result.ended == pytest.approx(101 * 0.02, rel=0.02)
    one_by_one = [groups[0], Group(name="d", role="decode", count=1, step=(0.02, 0.0, 0.0), batch=1)]
    assert simulate(requests, one_by_one, [[Way(0, 1, 1.0)]], only).ended == pytest.approx(1010 * 0.02, rel=0.02)


def test_prefill_slows_decode_down_in_one_engine() -> None:
    requests = [Request(0.0, 1, 101), Request(0.5, 10_000, 1)]
    groups, ways = engines("both", 1, 4, math.inf)
    alone = simulate(requests[:1], groups, ways, only)
    together = simulate(requests, groups, ways, only)
    assert together.further[0] > 1.4 * alone.further[0]
    assert together.first[1] > 1.0
