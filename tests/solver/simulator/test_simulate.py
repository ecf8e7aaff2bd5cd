"""The simulator against queueing theory, and nothing lost in it."""

from __future__ import annotations

import heapq
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deeplink.solver.exact.queueing import erlang_c, wait
from deeplink.solver.fleets.fleet import Request
from deeplink.solver.simulator.simulate import Group, Way, simulate

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


@pytest.mark.parametrize("exponential", [True, False], ids=["random service", "equal service"])
@pytest.mark.parametrize(("servers", "load"), [(1, 0.3), (1, 0.8), (2, 0.7), (4, 0.8), (16, 0.9)])
def test_each_request_waits_for_the_first_that_is_free(servers: int, load: float, exponential: bool) -> None:
    """First come, first served: request by request, so that what theory says of such queues holds of this one."""
    requests = poisson(5_000, load * servers, 1.0, exponential=exponential)
    free = [0.0] * servers
    for request, first in zip(requests, queue(requests, servers), strict=True):
        begin = max(request.at, heapq.heappop(free))
        heapq.heappush(free, begin + request.prompt * TOKEN)
        assert first == pytest.approx(begin + request.prompt * TOKEN - request.at, rel=1e-6, abs=1e-6)


def test_m_m_1() -> None:
    times = queue(poisson(80_000, 0.6, 1.0, exponential=True), 1)
    assert sum(times) / len(times) == pytest.approx(1 / (1 - 0.6), rel=0.05)


def test_m_d_1() -> None:
    """Pollaczek and Khinchine."""
    times = queue(poisson(80_000, 0.7, 1.0, exponential=False), 1)
    assert sum(times) / len(times) == pytest.approx(1 + 0.7 / (2 * (1 - 0.7)), rel=0.03)


def test_m_m_k() -> None:
    """The mean, and the wait that one in a hundred exceeds, for which the formula of the caps is exact here."""
    requests = poisson(120_000, 0.8 * 4, 1.0, exponential=True)
    times = queue(requests, 4)
    assert sum(times) / len(times) == pytest.approx(1 + erlang_c(4, 0.8) / (4 * (1 - 0.8)), rel=0.04)
    waits = sorted(first - request.prompt * TOKEN for request, first in zip(requests, times, strict=True))
    assert waits[int(0.99 * len(waits))] == pytest.approx(wait(0.99, 4, 0.8, 1.0, 1.0), rel=0.1)


def test_m_d_k() -> None:
    """Waiting about half as long as with random service (Cosmetatos; within a few parts in a hundred)."""
    servers, load = 8, 0.85
    times = queue(poisson(120_000, load * servers, 1.0, exponential=False), servers)
    random_service = erlang_c(servers, load) / (servers * (1 - load))
    correction = 1 + (1 - load) * (servers - 1) * (math.sqrt(4 + 5 * servers) - 2) / (16 * load * servers)
    assert sum(times) / len(times) - 1 == pytest.approx(random_service / 2 * correction, rel=0.06)
    waits = sorted(first - 1 for first in times)
    assert waits[int(0.99 * len(waits))] == pytest.approx(wait(0.99, servers, load, 1.0, 0.5), rel=0.15)


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
