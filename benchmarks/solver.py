"""The solver: is it right, is it fast, are its rates good, is its simulator.

    python benchmarks/solver.py [--json] [--save] [NAME …]

Each row has the goal as its mark where there is nothing else to compare with. The error of rates is that of each
measured point as predicted by all others of its chip, model and group size, with the surface fitted anew without it;
the mark is a fit of three coefficients (fixed, by the requests, by the tokens) to the same points. `vs_aiconfigurator`
takes the rates of one worker that aiconfigurator 0.12.0 gives for Qwen3-32B on H200 (4,000 / 1,000 tokens; 2.313
requests/s of a prefill worker on one chip, 3.639 of a decode worker on two) and its rule (0.90 and 0.92 of them may be
used), and asks for the most that 32 chips can serve; the mark is what it says itself.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import bursts
import intervals
import numpy as np
import second
import silicon
import silicon_ttft
from rows import RESULTS, Row, machine, table, write_table

from deeplink.solver.estimates import catalogue, importers, roofline, surface
from deeplink.solver.estimates import table as tables
from deeplink.solver.estimates.rates import Measurement, Phase, Rates
from deeplink.solver.exact import highs, pareto, program
from deeplink.solver.exact.highs import Effort
from deeplink.solver.exact.problem import Candidate, Cap, Link, Pool, Problem, Route, Scenario, useful
from deeplink.solver.exact.queueing import erlang_c
from deeplink.solver.exact.solve import solve
from deeplink.solver.fleets.fleet import Request
from deeplink.solver.simulator.simulate import Group, Way, simulate

ROOT = Path(__file__).parents[1]
DATA = ROOT / "solver" / "data"
EFFORT = Effort(gap=1e-3)
CASES = 240


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only these rows")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--save", action="store_true", help="write results/solver.json and README.md's table")
    arguments = parser.parse_args()
    about = machine()
    wanted = arguments.names or list(FAMILIES)
    unknown = [name for name in wanted if name not in FAMILIES]
    if unknown:
        parser.error(f"no row is called {unknown[0]}; there are {', '.join(FAMILIES)}")
    done: list[Callable[[], Iterator[Row]]] = []
    rows = []
    for name in wanted:
        if FAMILIES[name] not in done:
            done.append(FAMILIES[name])
            for row in FAMILIES[name]():
                print(f"{row.name}: {row.value:.4g} {row.unit}", file=sys.stderr, flush=True)
                rows.append(row.as_json())
    result = {"machine": about, "rows": rows}
    if arguments.save:
        if arguments.names:
            result = _merged(json.loads((RESULTS / "solver.json").read_text()), rows)
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "solver.json").write_text(json.dumps(result, indent=2) + "\n")
        write_table("solver", result)
    print(json.dumps(result, indent=2) if arguments.json else table(rows))


def _merged(saved: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What was saved, with these rows in place of those of the same name, or at the end."""
    new = {row["name"]: row for row in rows}
    kept = [new.pop(row["name"], row) for row in saved["rows"]]
    return {**saved, "rows": [*kept, *new.values()]}


def _optimality() -> Iterator[Row]:
    """Independent code, with the tests: every placement there is."""
    sys.path.insert(0, str(ROOT / "tests" / "solver"))
    import cases

    equal = sum(cases.equal(seed) for seed in range(CASES))
    yield Row("optimality_small", equal, "cases equal", "cases", CASES, 1.0, "at least")


SECOND = 50


def _second() -> Iterator[Row]:
    """The same programs by SCIP and by CP-SAT, which come with OR-Tools (`second.py`); nothing where that is not
    installed. What ends without an answer is not agreed on."""
    try:
        from ortools.linear_solver.python import model_builder
        from ortools.sat.python import cp_model
    except ImportError:
        print("second_solver: skipped, OR-Tools is not installed", file=sys.stderr)
        return
    agree = {"second_solver": 0, "second_solver_cp_sat": 0}
    solvers = (partial(second.scip, model_builder), partial(second.cp_sat, cp_model))
    for seed in range(SECOND):
        problem = fleet(seed, 3, 24, 3, 2)
        model = program.build(replace(problem, candidates=useful(problem)))
        ours = highs.solve(model.program, model.cost, effort=Effort(1e-6))
        none = ours.status == "infeasible"
        for name, solver in zip(agree, solvers, strict=True):
            try:
                theirs = solver(model)
            except second.Undecided as exc:
                print(f"{name}, problem {seed}: {exc}", file=sys.stderr)
                continue
            same = theirs is None if none else theirs is not None and math.isclose(theirs, ours.value, rel_tol=1e-5)
            agree[name] += same
    for name, count in agree.items():
        yield Row(name, count, "problems agreed on", "problems", SECOND, 1.0, "at least")


def _sweep() -> Iterator[Row]:
    """A link of 50 to 3.5 GB/s between two unlike pools: is handing over worth it? Trying everything says."""
    sys.path.insert(0, str(ROOT / "tests" / "solver"))
    import sweep

    right = sum(solved == tried for solved, tried in map(sweep.splits, sweep.RATES))
    yield Row("transfer_sweep", right, "links judged right", "links", len(sweep.RATES), 1.0, "at least")


def fleet(seed: int, types: int, chips: int, configs: int, buckets: int = 4) -> Problem:
    """A random problem: so many types of chips, configurations for each of the three roles, three scenarios."""
    draw = random.Random(seed)
    parts = [draw.random() + 0.3 for _ in range(types)]
    compute = [draw.uniform(0.3, 1) for _ in range(types)]
    memory = [draw.uniform(0.3, 1) for _ in range(types)]
    prompts = [draw.choice([512, 1024, 2048, 4096, 8192]) for _ in range(buckets)]
    outputs = [draw.choice([64, 128, 256, 512]) for _ in range(buckets)]
    pools, candidates = [], []
    for t in range(types):
        count = max(1, int(chips * parts[t] / sum(parts)))
        price = round((compute[t] + memory[t]) * 2 * draw.uniform(0.7, 1.3), 3)
        pools.append(Pool(name=f"type{t}", count=count, price=price, watts=400))
        for role in ("prefill", "decode", "both"):
            for index in range(configs):
                group = 2 ** draw.randrange(4)
                speed = draw.uniform(0.7, 1) * 0.93 ** (group.bit_length() - 1) * group
                prefill = tuple(p / 8000 / (compute[t] * speed) for p in prompts)
                decode = tuple(
                    o / 2000 / (memory[t] * speed) * (1 + p / 16000) for p, o in zip(prompts, outputs, strict=True)
                )
                room = tuple((p + o) * o / 4e7 / group for p, o in zip(prompts, outputs, strict=True))
                base = draw.uniform(0.5, 0.8)
                uses: tuple[tuple[float, ...], ...]
                if role == "prefill":
                    uses, latency = (prefill,), tuple(2.5 * s for s in prefill)
                elif role == "decode":
                    uses, latency = (decode, room), (0.0,) * buckets
                else:
                    uses = (tuple(p + d for p, d in zip(prefill, decode, strict=True)), room)
                    latency = tuple(4 * s for s in prefill)
                caps = tuple(Cap(n, (min(0.95, base + 0.08 * step),) * len(uses)) for step, n in enumerate((1, 4, 16)))
                candidates.append(
                    Candidate(
                        name=f"type{t}-{role}-{index}",
                        role=role,  # type: ignore[arg-type]
                        pool=t,
                        group=group,
                        uses=uses,
                        latency=latency,
                        serves=(True,) * buckets,
                        caps=caps,
                    )
                )
    links, routes = [], []
    for i in range(types):
        for j in range(types):
            if draw.random() < 0.15:
                continue
            rate = draw.choice([3.5, 7, 12.5, 25, 50])
            sent = tuple(p * 262144 / 1e9 for p in prompts)
            links.append(Link(f"{i} -> {j}", rate * 0.7 * max(2, chips // 64)))
            routes.append(Route(i, j, tuple(gb / rate for gb in sent), ((len(links) - 1, sent),)))
    ones = (1.0,) * types
    scenarios = (
        Scenario("normal", 1, ones),
        Scenario("burst", 1.5, ones),
        Scenario("loss", 0.7, (0.0, *ones[1:])),
    )
    return Problem(
        pools=tuple(pools),
        candidates=tuple(candidates),
        rates=tuple(draw.uniform(0.2, 1) * chips * 0.15 for _ in range(buckets)),
        scenarios=scenarios,
        routes=tuple(routes),
        links=tuple(links),
        ttft=6.0,
    )


SEEDS = (0, 1, 2)


def _times() -> Iterator[Row]:
    gaps = []
    for name, chips, limit in (("time_1024", 1024, 10.0), ("time_10000", 10_000, 60.0)):
        worst = 0.0
        for seed in SEEDS:
            for objective in ("cost", "throughput"):
                problem = fleet(seed, 8, chips, 24)
                began = time.perf_counter()
                found = solve(replace(problem, candidates=useful(problem)), objective, EFFORT)  # type: ignore[arg-type]
                worst = max(worst, time.perf_counter() - began)
                if found.status == "infeasible":
                    raise SystemExit(f"{name}: the generator's problem {seed} has no placement")
                gaps.append(found.gap)
        yield Row(name, worst, "s", "the goal", limit, limit, of="value")
    yield Row("gap_worst", max(gaps), "of the value", "the goal", 0.01, 0.01, of="value")
    worst = 0.0
    for seed in SEEDS[:2]:
        problem = fleet(seed, 8, 1024, 24)
        began = time.perf_counter()
        points = pareto.front(replace(problem, candidates=useful(problem)), 10, EFFORT)
        worst = max(worst, time.perf_counter() - began)
        if len(points) != 10:
            raise SystemExit(f"time_pareto_1024: {len(points)} points instead of ten")
    yield Row("time_pareto_1024", worst, "s", "the goal", 60.0, 60.0, of="value")


def _rates() -> Iterator[Row]:
    models = catalogue.known_models()
    splitwise = importers.splitwise(DATA / "splitwise" / "perf_model.csv.gz")
    for phase, goal in (("decode", 0.04), ("prefill", 0.12)):
        yield _left_out(f"splitwise_{phase}", splitwise, (phase,), goal)  # type: ignore[arg-type]
    yield _left_out("helix", importers.helix(DATA / "helix", models), ("prefill", "decode"), 0.15)


def _left_out(name: str, rows: Sequence[Measurement], phases: Sequence[Phase], goal: float) -> Row:
    models = catalogue.known_models()
    chips = {row.chip: catalogue.chip(row.chip) for row in rows}
    kept, _ = tables.possible(rows, models, chips, "float16")
    groups: dict[tuple[str, str, int, Phase], list[Measurement]] = defaultdict(list)
    for row in kept:
        if row.phase in phases:
            groups[row.chip, row.model, row.tp, row.phase].append(row)
    ours, fit = [], []
    for (chip, model, tp, phase), mine in sorted(groups.items()):
        rates = Rates(models[model], chips[chip], tp, "float16", catalogue.fractions(chips[chip]))
        points: dict[tuple[float, float], list[float]] = defaultdict(list)
        for row in mine:
            points[row.sizes].append(row.seconds)
        sizes = sorted(points)
        seconds = [statistics.median(points[size]) for size in sizes]
        priors = [
            math.log((rates.prefill(s, requests=n) if phase == "prefill" else rates.decode(n, s)).seconds)
            for n, s in sizes
        ]
        for out in range(len(sizes)):
            others = [index for index in range(len(sizes)) if index != out]
            fitted = surface.fit(
                [sizes[i] for i in others], [math.log(seconds[i]) for i in others], [priors[i] for i in others]
            )
            predicted = math.exp(fitted.at(sizes[out], priors[out])[0])
            ours.append(abs(predicted / seconds[out] - 1))
            fit.append(abs(_three(sizes, seconds, others, sizes[out]) / seconds[out] - 1))
    return Row(name, statistics.mean(ours), "mean error", "three coefficients", statistics.mean(fit), goal, of="value")


def _three(
    sizes: Sequence[tuple[float, float]], seconds: Sequence[float], others: Sequence[int], at: tuple[float, float]
) -> float:
    matrix = np.array([[1.0, sizes[i][0], sizes[i][0] * sizes[i][1]] for i in others])
    values = np.array([seconds[i] for i in others])
    found = np.linalg.lstsq(matrix / values[:, None], np.ones(len(values)), rcond=None)[0]
    return float(found @ np.array([1.0, at[0], at[0] * at[1]]))


def _intervals() -> Iterator[Row]:
    """Chips of which nothing is known but the datasheet: how often the times that were measured on them are within the
    error that is stated. The few constants of the usual fractions were chosen with these chips in sight."""
    models = catalogue.known_models()
    rows = importers.splitwise(DATA / "splitwise" / "perf_model.csv.gz") + importers.helix(DATA / "helix", models)
    chips = {row.chip: catalogue.chip(row.chip) for row in rows}
    kept, _ = tables.possible(rows, models, chips, "float16")
    settings: dict[tuple[str, str, int, Phase, tuple[float, float]], list[float]] = defaultdict(list)
    for row in kept:
        if chips[row.chip].watts:  # without the power-capped H100, whose peak is not known
            settings[row.chip, row.model, row.tp, row.phase, row.sizes].append(row.seconds)
    within, widths = [], []
    for (chip, model, tp, phase, (requests, size)), seconds in settings.items():
        rates = Rates(models[model], chips[chip], tp, "float16", roofline.usual(chips[chip]))
        rate = rates.prefill(size, requests=requests) if phase == "prefill" else rates.decode(requests, size)
        off = math.exp(abs(math.log(rate.seconds / statistics.median(seconds)))) - 1
        within.append(off <= rate.error)
        widths.append(rate.error)
    yield Row("interval_coverage", statistics.mean(within), "of the settings", "stated", 0.9, 0.85, "at least", "value")
    yield Row("interval_half_width", statistics.median(widths), "of the time", "the goal", 0.5, 0.5, of="value")
    coverage, half = intervals.found()  # learnt from the other chips alone
    yield Row("interval_learnt_coverage", coverage, "of the settings", "stated", 0.9, 0.85, "at least", "value")
    yield Row("interval_learnt_half_width", half, "of the time", "the goal", 0.5, 0.5, of="value")


def _aiconfigurator() -> Iterator[Row]:
    def worker(name: str, role: str, group: int, rate: float, share: float) -> Candidate:
        return Candidate(
            name=name,
            role=role,  # type: ignore[arg-type]
            pool=0,
            group=group,
            uses=((1 / rate,),),
            latency=(0.0,),
            serves=(True,),
            caps=(Cap(1, (share,)),),
        )

    problem = Problem(
        pools=(Pool(name="h200", count=32),),
        candidates=(worker("prefill", "prefill", 1, 2.313, 0.90), worker("decode", "decode", 2, 3.639, 0.92)),
        rates=(1.0,),
        scenarios=(Scenario("normal", 1.0, (1.0,)),),
        routes=(Route(0, 0, (0.0,)),),
    )
    found = solve(problem, "throughput")
    yield Row("vs_aiconfigurator", found.value, "requests/s", "aiconfigurator", 29.14, 0.9999, "at least")


AICONFIGURATOR_TPOT, AICONFIGURATOR_TTFT = 0.22, 0.71
"""Mean errors of aiconfigurator 0.12.0 (with its current tables and the engine's version blanked) on 118 of the runs of
Qwen3-32B on H100, which it was asked for one by one when this was planned."""
_ODD = ("Llama-3.1-8B", "vllm")


def _silicon() -> Iterator[Row]:
    """Whole plans as they were served, replayed, each model predicted from the runs of the two others (`silicon.py`,
    `silicon_ttft.py`)."""
    errors = silicon_ttft.left_out()
    mean = statistics.mean
    ttft, tpot = mean(one.ttft for one in errors), mean(one.tpot for one in errors)
    qwen = mean(one.tpot for one in errors if one.run.model == "Qwen3-32B")
    rest = mean(one.tpot for one in errors if (one.run.model, one.run.engine) != _ODD)
    alone = mean(one.tpot for one in silicon.left_out())
    unit, mark = "mean error", "aiconfigurator, 118 of the runs"
    yield Row("silicon_tpot", tpot, unit, mark, AICONFIGURATOR_TPOT, 0.15, of="value")
    yield Row("silicon_tpot_qwen3_32b", qwen, unit, mark, AICONFIGURATOR_TPOT, 0.15, of="value")
    yield Row("silicon_tpot_one_source_less", rest, unit, "all of them", tpot)
    yield Row("silicon_tpot_not_replayed", alone, unit, "replayed", tpot)
    yield Row("silicon_ttft", ttft, unit, mark, AICONFIGURATOR_TTFT, 0.25, of="value")
    yield Row("silicon_ttft_median", statistics.median(one.ttft for one in errors), "median error", "the mean", ttft)
    # Of the third model, the runs of every engine contradict themselves or others.
    rest = mean(one.ttft for one in errors if one.run.model != "Llama-3.1-8B")
    yield Row("silicon_ttft_without_llama_8b", rest, unit, "all of them", ttft)
    # What is left with the engine's two numbers, and a factor, from the answer of each source itself.
    yield Row("silicon_ttft_fitted_to_itself", mean(one.seen for one in errors), unit, "the goal", 0.25)


def _placed() -> Iterator[Row]:
    """Starts real engines (minutes); needs what `deeplink demo` needs."""
    import placed

    for name, error, predicted, measured in placed.errors(placed.run()):
        note = f"predicted {predicted * 1e3:.4g} ms"
        yield Row(f"real_{name}", error, "of the measured", "measured, s", measured, 0.2, of="value", note=note)


def _simulator() -> Iterator[Row]:
    draw = random.Random(0)
    at, requests = 0.0, []
    for _ in range(1_000_000):
        at += draw.expovariate(40)
        requests.append(Request(at, draw.choice((200, 1000, 4000)), draw.choice((50, 200, 400))))
    groups = [
        Group(name="prefill", role="prefill", count=16, prefill=lambda tokens: tokens * 1.5e-4),
        Group(name="decode", role="decode", count=16, step=(0.015, 1e-4, 1e-9), batch=128),
    ]
    began = time.perf_counter()
    result = simulate(requests, groups, [[Way(0, 1, 1.0, 0.001, 1e-6)]], lambda request: 0)
    yield Row("simulator_1m", time.perf_counter() - began, "s", "the goal", 60.0, 60.0, of="value")
    kept = sum(1 for first, further in zip(result.first, result.further, strict=True) if first > 0 and further > 0)
    yield Row("simulator_conservation", kept, "requests answered", "requests", len(requests), 1.0, "at least")
    for name, servers, load, varies, wanted in (
        ("simulator_mm1", 1, 0.8, True, _random_service(1, 0.8)),
        ("simulator_mmk", 8, 0.85, True, _random_service(8, 0.85)),
        ("simulator_md1", 1, 0.7, False, 1 + 0.7 / (2 * (1 - 0.7))),
        ("simulator_mdk", 8, 0.85, False, _equal_service(8, 0.85)),
    ):
        at, requests = 0.0, []
        for _ in range(300_000):
            at += draw.expovariate(load * servers)
            requests.append(Request(at, max(1, round((draw.expovariate(1) if varies else 1.0) * 1e6)), 1))
        one = Group(name="queue", role="both", count=servers, prefill=lambda tokens: tokens * 1e-6)
        times = simulate(requests, [one], [[Way(0, 0, 1.0)]], lambda request: 0, policy="shared").first
        error = abs(statistics.mean(times) / wanted - 1)
        yield Row(name, error, "of the mean time", "the goal", 0.05, 0.05, of="value")


def _random_service(servers: int, load: float) -> float:
    """The mean time in M/M/k, in service times."""
    return 1 + erlang_c(servers, load) / (servers * (1 - load))


def _equal_service(servers: int, load: float, most: int = 400) -> float:
    """The mean time in M/D/k, in service times, from how many are there one service time after the other (Crommelin):
    all that were in service have left then, and those that came meanwhile are there."""
    came = [math.exp(-load * servers)]
    for count in range(1, most):
        came.append(came[-1] * load * servers / count)
    moves = np.zeros((most, most))
    for there in range(most):
        stay = max(there - servers, 0)
        moves[there, stay:] = came[: most - stay]
    moves /= moves.sum(axis=1, keepdims=True)  # more than `most` are never there
    matrix = np.vstack([moves.T - np.eye(most), np.ones(most)])
    chances = np.linalg.lstsq(matrix, np.append(np.zeros(most), 1.0), rcond=None)[0]
    return float(chances @ np.arange(most)) / (load * servers)  # Little


def _traces() -> Iterator[Row]:
    reversed_ = 0
    for name, file in (("azure", "azure2023_conv.csv.gz"), ("mooncake", "mooncake_conversation.jsonl.gz")):
        case = bursts.case(Path(__file__).with_name("data") / file)
        rate, plan = bursts.planned(case)
        yield Row(
            f"trace_attainment_{name}",
            bursts.attained(case, plan, rate),
            "in time",
            "wanted",
            bursts.SHARE,
            1.0,
            "at least",
        )
        sustained = bursts.sustained(case, plan, rate / 2)
        best = bursts.best(case, sustained)
        yield Row(f"trace_rate_{name}", sustained, "of the rate", "the best of 35 plans", best, 0.95, "at least")
        yield Row(f"trace_planned_{name}", rate, "of the rate", "what it sustains", sustained)
        alone = [bursts.planned(case, (size,))[0] for size in (1, 8)]
        real = [bursts.sustained(case, plan) for plan in ((16, 0, 0, 0), (0, 0, 0, 2))]
        reversed_ += (alone[0] > alone[1]) == (real[0] > real[1])
    yield Row("trace_reversal", reversed_, "traces ranked right", "traces", 2, 1.0, "at least")


FAMILIES: dict[str, Callable[[], Iterator[Row]]] = {
    "optimality_small": _optimality,
    **dict.fromkeys(("time_1024", "time_10000", "gap_worst", "time_pareto_1024"), _times),
    **dict.fromkeys(("splitwise_decode", "splitwise_prefill", "helix"), _rates),
    **dict.fromkeys(("interval_coverage", "interval_half_width", "interval_learnt_half_width"), _intervals),
    **dict.fromkeys(("second_solver", "second_solver_cp_sat"), _second),
    "transfer_sweep": _sweep,
    **dict.fromkeys(("silicon_tpot", "silicon_ttft"), _silicon),
    **dict.fromkeys(("real_ttft", "real_tpot"), _placed),
    "vs_aiconfigurator": _aiconfigurator,
    **dict.fromkeys(("trace_attainment_azure", "trace_attainment_mooncake", "trace_reversal"), _traces),
    **dict.fromkeys(
        ("simulator_1m", "simulator_conservation", "simulator_mm1", "simulator_mmk", "simulator_md1", "simulator_mdk"),
        _simulator,
    ),
}


if __name__ == "__main__":
    main()
