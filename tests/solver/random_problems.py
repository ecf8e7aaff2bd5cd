"""Small problems of every kind, by a seed."""

from __future__ import annotations

import random

from deeplink.solver.exact.problem import Candidate, Cap, Link, Pool, Problem, Route, Scenario


def problem(seed: int) -> Problem:
    draw = random.Random(seed)
    pools = tuple(_pool(draw, p) for p in range(draw.choice((1, 2, 2, 2))))
    buckets = draw.choice((1, 1, 2))
    candidates = []
    for p, pool in enumerate(pools):
        for role in ("prefill", "decode", "both"):
            for index in range(draw.choice((0, 1, 1, 1, 2) if len(pools) == 1 else (0, 1, 1))):
                candidates.append(_candidate(draw, f"{pool.name}{role}{index}", role, p, pool, buckets))
    links = []
    routes = []
    for i in range(len(pools)):
        for j in range(len(pools)):
            if draw.random() < 0.2:
                continue
            loads = []
            for _ in range(draw.choice((0, 1, 1))):
                owner = draw.choice((None, i, j))
                links.append(Link(f"{i}{j}", draw.uniform(0.5, 8.0), owner, "decode" if owner == j != i else "prefill"))
                loads.append((len(links) - 1, tuple(draw.uniform(0.1, 1.0) for _ in range(buckets))))
            seconds = tuple(draw.uniform(0.0, 0.6) for _ in range(buckets))
            routes.append(Route(i, j, seconds, tuple(loads), draw.choice((0.0, 0.1)), draw.choice((1, 2))))
    scenarios = [Scenario("normal", 1.0, (1.0,) * len(pools))]
    if draw.random() < 0.5:
        scenarios.append(Scenario("burst", draw.uniform(1.1, 1.6), (1.0,) * len(pools)))
    if draw.random() < 0.3:
        lost = draw.randrange(len(pools))
        left = tuple(draw.choice((0.0, 0.5)) if p == lost else 1.0 for p in range(len(pools)))
        scenarios.append(Scenario("loss", draw.uniform(0.2, 0.7), left))
    rates = [draw.choice((0.0, 1.0, 1.0, 1.0)) * draw.uniform(0.3, 2.5) for _ in range(buckets)]
    return Problem(
        pools=pools,
        candidates=tuple(candidates),
        rates=tuple(rates) if any(rates) else (1.0,) * buckets,
        scenarios=tuple(scenarios),
        routes=tuple(routes),
        links=tuple(links),
        ttft=draw.choice((1.0, 1.5, 3.0)),
        budget=draw.choice((float("inf"), float("inf"), 25.0)),
    )


def _pool(draw: random.Random, p: int) -> Pool:
    count = draw.choice((1, 2, 3, 4))
    aligned = ((2, count - 1),) if count % 2 and draw.random() < 0.5 else ()
    return Pool(
        name=f"p{p}",
        count=count,
        price=draw.choice((1.0, 2.5, 4.0)),
        watts=draw.choice((300.0, 700.0)),
        aligned=aligned,
    )


def _candidate(draw: random.Random, name: str, role: str, p: int, pool: Pool, buckets: int) -> Candidate:
    group = draw.choice((1, 1, 2))
    resources = 1 if role == "prefill" else draw.choice((1, 2))
    uses = tuple(tuple(draw.uniform(0.1, 0.9) / group for _ in range(buckets)) for _ in range(resources))
    caps = [Cap(1, tuple(draw.uniform(0.4, 0.7) for _ in range(resources)))]
    for count in (2, 3):
        if draw.random() < 0.4:
            caps.append(Cap(count, tuple(min(1.0, share + draw.uniform(0.0, 0.2)) for share in caps[-1].shares)))
    return Candidate(
        name=name,
        role=role,  # type: ignore[arg-type]
        pool=p,
        group=group,
        uses=uses,
        latency=tuple(0.0 if role == "decode" else draw.uniform(0.1, 1.6) for _ in range(buckets)),
        serves=tuple(draw.random() < 0.9 for _ in range(buckets)),
        caps=tuple(caps),
    )
