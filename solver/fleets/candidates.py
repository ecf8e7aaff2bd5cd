"""A fleet as a problem: the candidates of all pools, what links them, and the situations to cope with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from deeplink.solver import kinds
from deeplink.solver.exact.problem import Candidate, Pool, Problem, Scenario, useful
from deeplink.solver.fleets import served, spanning
from deeplink.solver.fleets.configure import Place, Setup, Streams, rates_of, room_of
from deeplink.solver.fleets.fleet import Fleet, Inventory
from deeplink.solver.fleets.handoffs import Handoffs, handoffs


@dataclass(frozen=True, slots=True)
class Formulation:
    """The problem, and for each of its candidates by name what it stands for."""

    fleet: Fleet
    problem: Problem
    setups: dict[str, Setup]
    handoffs: Handoffs
    skipped: tuple[str, ...] = field(default=())


def formulate(fleet: Fleet, *, keep: frozenset[str] = frozenset()) -> Formulation:
    """The fleet's problem, without candidates that others replace, unless their names are to be kept."""
    buckets = fleet.workload.buckets
    found: list[Candidate] = []
    setups: dict[str, Setup] = {}
    skipped: list[str] = []
    replayed = Streams(fleet)
    for index, pool in enumerate(fleet.pools):
        skipped += [*served.impossible(pool, fleet.model), *_of_others(fleet, pool)]
        for tp in pool.tp:
            rates = rates_of(fleet, pool, tp)
            room = room_of(fleet, pool, tp)
            if room <= 0:
                skipped.append(f"{pool.name}: the weights do not fit on {tp} chips")
                continue
            measured = spanning.roles(pool, tp, rates)
            skipped += [
                f"{pool.name}: too little of {role} on {tp} chips of several hosts was measured"
                for role in pool.roles
                if role not in measured
            ]
            roles = tuple(role for role in measured if served.obstacle(pool, fleet.model, role, tp) is None)
            place = Place(fleet, pool, index, tp, rates, room, replayed, roles)
            for candidate, setup in place.candidates():
                found.append(candidate)
                setups[candidate.name] = setup
    smallest: dict[int, int] = {}
    for candidate in found:
        if candidate.role == "decode":
            smallest[candidate.pool] = min(candidate.chips, smallest.get(candidate.pool, candidate.chips))
    routed = handoffs(fleet, smallest)
    problem = Problem(
        pools=tuple(_pool(pool) for pool in fleet.pools),
        candidates=tuple(found),
        rates=tuple(fleet.workload.rate * bucket.share for bucket in buckets),
        scenarios=(
            Scenario("normal", 1.0, (1.0,) * len(fleet.pools)),
            *(
                Scenario(s.name, s.rate, tuple(1.0 - dict(s.lost).get(pool.name, 0.0) for pool in fleet.pools))
                for s in fleet.situations
            ),
        ),
        routes=routed.routes,
        links=routed.links,
        ttft=fleet.service.ttft * (1 - fleet.service.margin),
        budget=fleet.budget,
        buckets=tuple(bucket.name for bucket in buckets),
    )
    better = {candidate.name for candidate in useful(problem)} | keep
    kept = tuple(candidate for candidate in found if candidate.name in better)
    return Formulation(
        fleet,
        replace(problem, candidates=kept),
        {candidate.name: setups[candidate.name] for candidate in kept},
        routed,
        tuple(skipped),
    )


def _of_others(fleet: Fleet, pool: Inventory) -> list[str]:
    """That there are times of the pool's chip, and none of its engine's."""
    engines = {row.engine or kinds.DEFAULT for row in fleet.measurements if row.chip == pool.chip.name}
    if not engines or pool.engine in engines:
        return []
    return [
        f"{pool.name}: of {pool.chip.name} only times of {' and '.join(sorted(engines))} were measured, which are not "
        f"those of {pool.engine}; rates[].engine says whose a table is"
    ]


def _pool(pool: Inventory) -> Pool:
    aligned = tuple((size, usable) for size in pool.tp if (usable := spanning.usable(pool, size)) < pool.count)
    return Pool(name=pool.name, count=pool.count, price=pool.price, watts=pool.watts, aligned=aligned)
