"""Two published profiles of requests on two unlike chips, on one, and without handing over.

    python benchmarks/profiles.py [--json] [--save] [--links GB/s]

Sixteen chips each time, whichever they are, of Qwen3-32B in bfloat16: prompts of 8,000 or 30,000 tokens, answers of
2,000, one token within 50 ms of the last, the first within 5 or 15 s, ninety-nine times in a hundred. What is asked
for is the most requests a second. Each chip has its own link of 50 GB/s one way (400 Gbit/s), which is assumed.
All times are predicted from peaks (`solver/data/chips.csv` says whose), so they have the errors that are printed:
beside the answer is what it would be if all times of the chips at work were as slow, and as fast, as that.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import silicon
from rows import RESULTS, machine

from deeplink.solver.estimates import catalogue, model
from deeplink.solver.exact.highs import Effort
from deeplink.solver.exact.problem import Role
from deeplink.solver.exact.solve import solve
from deeplink.solver.fleets.candidates import formulate
from deeplink.solver.fleets.fleet import Bucket, Connection, Fleet, Inventory, Service, Workload
from deeplink.solver.place import document

CHIPS = 16
MODEL = "Qwen3-32B"
PROFILES = (("8K/2K", 8000.0, 2000.0, 5.0), ("30K/2K", 30000.0, 2000.0, 15.0))
PAIRS = (
    ("NVIDIA H100 SXM", "NVIDIA H20"),
    ("Ascend 910C", "NVIDIA H20"),
    ("Iluvatar BI-V150 (Tiangai 150)", "NVIDIA H20"),
)
EFFORT = Effort(gap=2e-3, seconds=60)


@dataclass(frozen=True, slots=True)
class Line:
    """One way to use sixteen chips: requests a second, and what they would be with slower and with faster chips; the
    times to first token in seconds; how many chips of each type run, and in what role."""

    profile: str
    pair: str
    way: str
    rate: float
    slower: float
    faster: float
    ttft_p50: float
    ttft_p99: float
    error: float
    engines: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--save", action="store_true", help="write results/profiles.json and README.md's table")
    parser.add_argument("--links", type=float, default=50.0, help="GB/s of each chip's link, one way")
    arguments = parser.parse_args()
    lines = list(_lines(arguments.links))
    result = {"machine": machine(), "links_gb_per_s": arguments.links, "lines": [asdict(line) for line in lines]}
    if arguments.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "profiles.json").write_text(json.dumps(result, indent=2) + "\n")
        _write(_table(lines))
    print(json.dumps(result, indent=2) if arguments.json else _table(lines))


def _lines(gigabytes: float) -> Iterator[Line]:
    for profile, prompt, output, ttft in PROFILES:
        for pair in PAIRS:
            label = " + ".join(_short(name) for name in pair)
            ways: list[tuple[str, Sequence[str], tuple[Role, ...]]] = [
                ("both chips, prefill and decode apart", pair, ("prefill", "decode")),
                *((f"{_short(name)}, prefill and decode apart", (name,), ("prefill", "decode")) for name in pair),
                *((f"{_short(name)}, all in one", (name,), ("both",)) for name in pair),
            ]  # fmt: skip
            for way, names, roles in ways:
                fleet = _fleet(names, roles, prompt, output, ttft, gigabytes)
                yield _line(fleet, profile, label, way)


def _line(fleet: Fleet, profile: str, pair: str, way: str) -> Line:
    formulation = formulate(fleet)
    found = solve(formulation.problem, "throughput", EFFORT)
    placed = document(formulation, found)
    rates = [rate for engine in placed.engines for rate in engine.rates]
    error = max((rate.error for rate in rates), default=0.0)
    if placed.predicted is None:
        return Line(profile, pair, way, 0.0, 0.0, 0.0, 0.0, 0.0, error, "nothing is in time")
    return Line(
        profile,
        pair,
        way,
        found.value,
        _with_pace(fleet, 1 + error),
        _with_pace(fleet, 1 / (1 + error)),
        placed.predicted.ttft_p50.value,
        placed.predicted.ttft_p99.value,
        error,
        ", ".join(f"{engine.count * engine.tp} {_short(engine.chip)} {engine.role}" for engine in placed.engines),
    )


def _with_pace(fleet: Fleet, pace: float) -> float:
    slower = replace(fleet, pools=tuple(replace(pool, pace=pace) for pool in fleet.pools))
    found = solve(formulate(slower).problem, "throughput", EFFORT, nicest=False)
    return 0.0 if found.status == "infeasible" else found.value


def _fleet(
    names: Sequence[str], roles: tuple[Role, ...], prompt: float, output: float, ttft: float, gigabytes: float
) -> Fleet:
    return Fleet(
        model=model.parse(silicon.CONFIGS[MODEL], MODEL),
        pools=tuple(_inventory(name, roles) for name in names),
        workload=Workload(1.0, 1.0, (Bucket("one", prompt, output, 1.0),)),
        service=Service(ttft, 0.05),
        objective="throughput",
        connections=tuple(Connection(a, b, gigabytes * 1e9, 0.0, "chip") for a in names for b in names),
        budget=float(CHIPS),  # each chip costs one
        effort=EFFORT,
        sensitivity=False,
    )


def _inventory(name: str, roles: tuple[Role, ...]) -> Inventory:
    chip = catalogue.chip(name)
    return Inventory(
        name=name,
        chip=chip,
        count=CHIPS,
        per_host=8,
        price=1.0,
        watts=chip.watts,
        roles=roles,
        tp=(1, 2, 4, 8),
        dtype="bfloat16",
        layout="block token head (kv dim)",
        casts=(),
        utilisation=0.9,
        fractions=catalogue.fractions(chip),
        engine="vllm",
    )


def _short(name: str) -> str:
    return name.removeprefix("NVIDIA ").removeprefix("Iluvatar ").split(" ")[0 if "Ascend" not in name else 1]


def _table(lines: Sequence[Line]) -> str:
    head = [
        "tokens",
        "chips",
        "way",
        "requests/s",
        "with other times",
        "TTFT p50",
        "TTFT p99",
        "error",
        "chips at work",
    ]
    out = [head, ["---"] * len(head)]
    for line in lines:
        out.append(
            [
                line.profile,
                line.pair,
                line.way,
                f"{line.rate:.2f}",
                f"{line.slower:.2f} to {line.faster:.2f}",
                f"{line.ttft_p50:.1f} s",
                f"{line.ttft_p99:.1f} s",
                f"±{line.error:.0%}",
                line.engines,
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in out) + f"\n\n{_verdict(lines)}\n\n{_cited()}"


def _cited() -> str:
    """Where the figures of each chip come from, and the parts of its peaks that are counted on."""
    sentences = []
    for name in dict.fromkeys(name for pair in PAIRS for name in pair):
        chip, reached = catalogue.chip(name), catalogue.fractions(catalogue.chip(name))
        sentences.append(
            f"- {_short(name)}: {dict(chip.flops)['16bit'] / 1e12:g} TFLOPS, {chip.memory / 1e9:g} GB, "
            f"{chip.bandwidth / 1e9:g} GB/s, {chip.link / 1e9:g} GB/s between chips of a host ({chip.source}). "
            f"Of these {reached.compute:.0%} of the operations and {reached.memory:.0%} of the bandwidth "
            f"({reached.source}), ±{reached.error:.0%}."
        )
    return "Cited:\n\n" + "\n".join(sentences)


def _verdict(lines: Sequence[Line]) -> str:
    """Where mixing wins and where it loses, against the best that one type of chip can do."""
    sentences = []
    for profile, pair in dict.fromkeys((line.profile, line.pair) for line in lines):
        mine = [line for line in lines if (line.profile, line.pair) == (profile, pair)]
        mixed, *alone = mine
        best = max(alone, key=lambda line: line.rate)
        gain = mixed.rate / best.rate - 1 if best.rate else float("inf")
        word = "wins" if gain > 0.005 else "loses" if gain < -0.005 else "is even"
        settled = mixed.slower > best.faster or best.slower > mixed.faster
        doubt = "" if settled else "; the ranges overlap, so only measuring settles it"
        sentences.append(f"- {profile}, {pair}: mixing {word}, {gain:+.0%} against {best.way}{doubt}.")
    return "\n".join(sentences)


def _write(text: str) -> None:
    page = Path(__file__).with_name("README.md")
    begin, end = "<!-- profiles: begin -->", "<!-- profiles: end -->"
    before, _, rest = page.read_text().partition(begin)
    _, _, after = rest.partition(end)
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}")


if __name__ == "__main__":
    main()
