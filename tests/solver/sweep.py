"""Two unlike pools and a link that gets slower: where handing over stops being worth it, solved and by trying."""

from __future__ import annotations

from dataclasses import replace

import exhaustive

from deeplink.solver.estimates import catalogue, model
from deeplink.solver.exact.problem import Problem
from deeplink.solver.exact.solve import solve
from deeplink.solver.fleets.candidates import Formulation, formulate
from deeplink.solver.fleets.fleet import Bucket, Connection, Fleet, Inventory, Service, Workload

RATES = (50.0, 25.0, 12.5, 7.0, 3.5)
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "vocab_size": 32000,
    "torch_dtype": "float16",
}
"""Without grouped heads, so that the cache is heavy: 2.6 MB a token."""


def inventory(name: str, chip: str, count: int, price: float) -> Inventory:
    found = catalogue.chip(chip)
    return Inventory(
        name=name,
        chip=found,
        count=count,
        per_host=8,
        price=price,
        watts=found.watts,
        roles=("prefill", "decode", "both"),
        tp=(4,),
        dtype="float16",
        layout="block token head (kv dim)",
        casts=(),
        utilisation=0.9,
        fractions=catalogue.fractions(found),
        engine="vllm",
    )


def formulation(gigabytes: float) -> Formulation:
    """Twelve chips of each, one bucket, and one link of so many GB/s between them."""
    fleet = Fleet(
        model=model.parse(LLAMA, "llama"),
        pools=(inventory("hopper", "NVIDIA H100 SXM", 12, 3.0), inventory("h20", "NVIDIA H20", 12, 1.2)),
        workload=Workload(1.6, 1.0, (Bucket("one", 3000.0, 250.0, 1.0),)),
        service=Service(4.0, 0.06),
        objective="cost",
        connections=(Connection("hopper", "h20", gigabytes * 1e9, 0.0, "link"),),
    )
    return formulate(fleet)


def few(problem: Problem) -> Problem:
    """With one budget for waiting, so that all placements can be tried."""
    kept = tuple(c for c in problem.candidates if c.role == "decode" or c.name.endswith("wait0.5"))
    kept = tuple(c for c in kept if c.role != "both" or "part0.6" in c.name)
    return replace(problem, candidates=kept)


def splits(gigabytes: float) -> tuple[bool, bool]:
    """Whether handing over is cheaper than not: as the solver says, and by trying everything."""
    problem = few(formulation(gigabytes).problem)
    found = solve(problem, "cost")
    solved = any(one.prefill != one.decode for one in found.passed[0]) if found.passed else False
    alone = replace(problem, candidates=tuple(c for c in problem.candidates if c.role == "both"))
    together, apart = exhaustive.cheapest(problem), exhaustive.cheapest(alone)
    tried = together is not None and (apart is None or together < apart - 1e-6)
    return solved, tried
