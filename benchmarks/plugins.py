"""What each engine's plugin costs at the start, and handoffs of SGLang beside those of its own transfer backend.

    make fabric; .venv/bin/python benchmarks/plugins.py [--json] [--save] [--rounds N] [--requests N] [--only KIND …]

Every kind of engine is started with deeplink and without, in turns and one at a time, until it says that it is ready.
Counted are the processor time of all its processes until then (a busy machine stretches wall time by more than is
measured here) and the memory of their own: anonymous pages and shared segments, without files, which all engines of an
environment share. The first start is that of a new installation, in which numba compiles deeplink's loops; later ones
find them. LMDeploy runs on a CPU with deeplink's platform alone, so there it is the migration backend that comes and
goes.

Handoffs: see `sglang_pairs`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sglang_pairs
from rows import RESULTS, Row, machine, table, write_table

from deeplink.bench.rows import Skipped
from deeplink.errors import LocalError
from deeplink.local import engines, environment, model, overlay, sglang, step
from deeplink.local.engines import Engine
from deeplink.local.process import Process

HERE = Path(__file__).parent
KINDS = ("vllm", "sglang", "lmdeploy")
START_SECONDS = 300.0


@dataclass(frozen=True)
class Cost:
    """Of one start: seconds of processor time, seconds, and MiB."""

    processor: float
    wall: float
    memory: float


class Starts:
    """Engines of every kind, with deeplink and without."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.packages = overlay.ensure(say)
        self.vllm = environment.ensure(environment.VLLM_CPU, say)
        self.sglang = environment.ensure(environment.SGLANG_CPU, say)
        self.lmdeploy = environment.ensure(environment.LMDEPLOY_CPU, say)
        # As an installer does, or every start would compile deeplink's modules.
        for env in (self.vllm, self.sglang, self.lmdeploy):
            subprocess.run([env.python, "-m", "compileall", "-q", self.packages], check=True, timeout=START_SECONDS)
        self.model = model.smollm2(self.vllm, self.packages, say)
        self.config = folder / "deeplink.toml"
        self.config.write_text("")

    def engine(self, name: str, role: str, **more: Any) -> Engine:
        (port,) = engines.free_ports(1)
        values: dict[str, Any] = {"model": self.model, "config": self.config, "block_size": 64, **more}
        return Engine(name=name, role=role, port=port, **values)

    def process(self, kind: str, deeplink: bool) -> Process:
        name = f"{kind}-{'with' if deeplink else 'without'}"
        role = "prefill" if deeplink else ""
        path = {"NUMBA_CACHE_DIR": str(self.folder / f"numba-{kind}")} if deeplink else {"PYTHONPATH": ""}
        if kind == "vllm":
            return engines.process(self.engine(name, role, env=path), self.vllm, self.packages, self.folder)
        if kind == "sglang":
            path = path if deeplink else {"PYTHONPATH": str(sglang.SHIMS)}
            return sglang.process(self.engine(name, role, env=path), self.sglang, self.packages, self.folder)
        return self._lmdeploy(name, deeplink)

    def _lmdeploy(self, name: str, deeplink: bool) -> Process:
        # In a form that LMDeploy reads, by what its tests have for that.
        sys.path.append(str(HERE.parent / "tests" / "lmdeploy_deeplink"))
        from older import older
        from programs import variables

        made = self.folder / "lmdeploy-model"
        if not made.exists():
            older(self.model, made)
        (port,) = engines.free_ports(1)
        words = ["-m", "deeplink.cli", "serve", "lmdeploy", made, "--model-name", "demo", "--dtype", "bfloat16"]
        words += ["--server-name", "127.0.0.1", "--server-port", str(port), "--session-len", "1024", "--eager-mode"]
        words += ["--max-batch-size", "4", "--cache-block-seq-len", "64", "--num-gpu-blocks", "64", "--disable-metrics"]
        if deeplink:
            words += ["--role", "Prefill", "--migration-backend", "deeplink"]
        config = self.folder / "lmdeploy.toml"
        config.write_text("[kv]\nforeign_seconds = 30\n")  # its router brings no tickets
        env = step.clean_environ() | variables() | {"DEEPLINK_CONFIG": str(config)}
        env["NUMBA_CACHE_DIR"] = str(self.folder / "numba-lmdeploy")
        log, url = self.folder / f"{name}.log", f"http://127.0.0.1:{port}"
        return Process(name, [self.lmdeploy.python, *words], env=env, log=log, url=url, cwd=self.folder)


def start(process: Process) -> Cost:
    """Start it, wait until it is ready, and end it."""
    began = time.perf_counter()
    with process:
        process.wait_ready(START_SECONDS)
        return cost(process, time.perf_counter() - began)


def cost(process: Process, wall: float) -> Cost:
    pids = process.descendants()
    return Cost(sum(map(cpu_seconds, pids)), wall, sum(map(own_memory, pids)))


def cpu_seconds(pid: int) -> float:
    """Of a process and of those of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def own_memory(pid: int) -> float:
    """MiB of anonymous pages and shared segments; a page that several processes share counts once in all."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):  # it has ended just now
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:"))) / 1024


def costs(starts: Starts, kinds: list[str], rounds: int) -> list[Row]:
    found: defaultdict[tuple[str, bool], list[Cost]] = defaultdict(list)
    for number in range(rounds):
        for kind in kinds:
            for deeplink in (False, True):
                say(f"start {number}: {kind} {'with' if deeplink else 'without'}")
                found[kind, deeplink].append(start(starts.process(kind, deeplink)))
    rows = []
    for kind in kinds:
        ours, alone = found[kind, True], found[kind, False]
        rows += rows_of(f"{kind}_first_start", ours[:1], alone[:1])
        if rounds > 1:
            rows += rows_of(f"{kind}_start", ours[1:], alone[1:])
    return rows


def rows_of(what: str, ours: list[Cost], alone: list[Cost]) -> Iterator[Row]:
    mark = "the engine without it"
    wall = statistics.median(one.wall for one in ours) - statistics.median(one.wall for one in alone)
    for name, unit in (("processor", "s"), ("memory", "MiB")):
        value, without = (statistics.median(getattr(one, name) for one in some) for some in (ours, alone))
        note = f"{value - without:+.2f} {unit}" + (f", {wall:+.1f} s of wall time" if name == "processor" else "")
        yield Row(f"{what}_{name}", value, unit, mark, without, note=note)


def memory(pairs: Mapping[str, sglang_pairs.Pair]) -> Row:
    ours, theirs = (
        sum(own_memory(pid) for process in pairs[name].processes for pid in process.descendants())
        for name in ("deeplink", "mooncake")
    )
    note = "of both engines after all requests, staging included"
    return Row("sglang_pair_memory", ours, "MiB", sglang_pairs.MARK, theirs, note=note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--save", action="store_true", help="write it to benchmarks/results and README.md")
    parser.add_argument("--rounds", type=int, default=3, help="starts of every kind, with and without")
    parser.add_argument("--requests", type=int, default=7, help="of every length")
    parser.add_argument("--only", choices=KINDS, action="append", help="kinds to start")
    arguments = parser.parse_args()
    about = machine()
    with ExitStack() as ends:
        starts = Starts(Path(tempfile.mkdtemp(prefix="deeplink-plugins-")))
        say(f"logs, kept after a failure: {starts.folder}")
        found = costs(starts, arguments.only or list(KINDS), arguments.rounds)
        skipped = []
        try:
            pairs, alone = sglang_pairs.begin(starts.engine, starts.sglang, starts.packages, starts.folder, ends)
            found += sglang_pairs.timed(pairs, alone, arguments.requests)
            found.append(memory(pairs))
        except (LocalError, SystemExit) as exc:  # the starts were measured all the same
            skipped.append(Skipped("sglang_pairs", str(exc)))
            say(str(exc))
    if not skipped:
        shutil.rmtree(starts.folder)
    result = {
        "machine": about,
        "rows": [row.as_json() for row in found],
        "skipped": [row.as_json() for row in skipped],
    }
    if arguments.save:
        (RESULTS / "plugins.json").write_text(json.dumps(result, indent=2) + "\n")
        write_table("plugins", result)
    print(json.dumps(result, indent=2) if arguments.json else table(result["rows"]))


def say(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    main()
