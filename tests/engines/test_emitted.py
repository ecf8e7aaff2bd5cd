"""Every command that a placement is started with, by the engine's own argument parser, in one process."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import cpu_fleet
import msgspec
import pytest
import yaml
from described import FLEET, write
from fleet import Fleet

from deeplink.chips.catalogue import PROFILES
from deeplink.errors import LocalError
from deeplink.local import client
from deeplink.solver import emit
from deeplink.solver.fleets import fleetfile
from deeplink.solver.place import place
from deeplink.solver.placement import Placement

PROGRAM = """
import json, sys
from vllm.entrypoints.cli.serve import make_arg_parser, validate_parsed_serve_args
from vllm.plugins import load_general_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser

load_general_plugins()
parser = make_arg_parser(FlexibleArgumentParser())
for words in json.load(sys.stdin):
    args = parser.parse_args(words)
    validate_parsed_serve_args(args)
    hosts = [args.nnodes, args.node_rank, args.master_addr, args.headless]
    print(json.dumps([args.model_tag, args.port, args.tensor_parallel_size, args.max_num_seqs, *hosts]))
"""


@pytest.fixture(scope="module")
def placements(tmp_path_factory: pytest.TempPathFactory) -> list[Placement]:
    """One with handoffs, one where each engine does all, and engines on every chip that there is a profile of."""
    folder = tmp_path_factory.mktemp("placements")
    split = place(fleetfile.load(write(folder)))
    flags = 'roles = ["both"]\nflags = ["--block-size", "64", "--enforce-eager", "--dtype", "bfloat16"]\nprice'
    alone = place(fleetfile.load(write(folder, FLEET.replace("price", flags))))
    assert {engine.role for engine in alone.engines} == {"both"}
    every = [
        msgspec.structs.replace(engine, name=f"{engine.name} {index}", chip=profile.title)
        for index, profile in enumerate(PROFILES)
        for engine in (split.engines[0], alone.engines[0])
    ]
    return [split, alone, msgspec.structs.replace(split, engines=tuple(every), routes=())]


@pytest.fixture(scope="module")
def several_hosts(placements: list[Placement]) -> Placement:
    """Each engine on two hosts, which only Kubernetes starts."""
    engines = tuple(msgspec.structs.replace(one, tp=16, hosts=2) for one in placements[0].engines)
    return msgspec.structs.replace(placements[0], engines=engines)


def pods(placement: Placement) -> list[list[str]]:
    """The words of a leader and of a worker, with the variables that it finds there."""
    found = []
    for one in yaml.safe_load_all(emit.files(placement, "k8s")["placement.yaml"]):
        if one["kind"] == "LeaderWorkerSet":
            template = one["spec"]["leaderWorkerTemplate"]
            for pod in (template["leaderTemplate"], template["workerTemplate"]):
                words = _words(pod["spec"]["containers"][0]["args"])
                values = {"$(LWS_LEADER_ADDRESS)": "engine-0.engine.default", "$(LWS_WORKER_INDEX)": "1"}
                found.append([values.get(word, word) for word in words])
    return found


def commands(placement: Placement) -> list[list[str]]:
    """The words after `vllm serve`, as each of the formats has them."""
    script = emit.files(placement, "local")["engines.sh"]
    lines = [line for line in script.splitlines() if " vllm serve " in f" {line}"]
    found = [_words(shlex.split(line.partition(" > ")[0])) for line in lines]
    services = yaml.safe_load(emit.files(placement, "compose")["compose.yaml"])["services"]
    found += [_words(service["entrypoint"]) for name, service in services.items() if name != "router"]
    for one in yaml.safe_load_all(emit.files(placement, "k8s")["placement.yaml"]):
        if one["kind"] == "Deployment" and one["metadata"]["name"] != "deeplink-router":
            found.append(_words(one["spec"]["template"]["spec"]["containers"][0]["args"]))
    found += [_words(one["words"]) for one in json.loads(emit.files(placement, "ray")["ray.json"])["engines"]]
    assert len(found) == 4 * sum(engine.count for engine in placement.engines)
    return found


def _words(line: list[str]) -> list[str]:
    at = line.index("vllm")
    assert line[at + 1] == "serve"
    return line[at + 2 :]


def parse(fleet: Fleet, given: list[list[str]]) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(fleet.overlay), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return subprocess.run(
        [fleet.environment.python, "-c", PROGRAM],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=200,
        env=env,
        cwd=fleet.folder,
    )


def test_the_engine_parses_every_command(fleet: Fleet, placements: list[Placement], several_hosts: Placement) -> None:
    nodes = pods(several_hosts)
    given = [*nodes, *(words for placement in placements for words in commands(placement))]
    done = parse(fleet, given)
    assert done.returncode == 0, done.stderr[-3000:]
    parsed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(parsed) == len(given) > 100
    for words, (model, port, tp, *_) in zip(given, parsed, strict=True):
        assert [model, str(port), str(tp)] == [words[0], *(words[words.index(f) + 1] for f in _CHECKED)]
    hosts = [[2, rank, "engine-0.engine.default", rank > 0] for _ in several_hosts.engines for rank in (0, 1)]
    assert [one[4:] for one in parsed[: len(nodes)]] == hosts
    assert {tuple(one[4:6]) for one in parsed[len(nodes) :]} == {(1, 0)}


_CHECKED = ("--port", "--tensor-parallel-size")


def test_a_flag_the_engine_does_not_have_is_found_out(fleet: Fleet, placements: list[Placement]) -> None:
    done = parse(fleet, [[*commands(placements[0])[0], "--no-such-flag"]])
    assert done.returncode == 2
    assert "--no-such-flag" in done.stderr


CPU_POOL = """\
[[pools]]
name = "{role}"
chip = "{role} threads"
count = 1
per_host = 1
roles = ["{role}"]
kv_dtype = "float32"
layout = "vllm-cpu-vec"
flags = ["--dtype", "float32", "--block-size", "{block}", "--enforce-eager", "--max-model-len", "1024",
         "--kv-cache-memory-bytes", "314572800"]
env = {{VLLM_CPU_OMP_THREADS_BIND = "nobind", OMP_NUM_THREADS = "{threads}"}}
[[chips]]
name = "{role} threads"
profile = "cpu-x86"
tflops = 2
memory_gb = 4
memory_gb_per_s = 100
source = "more than there can be"
"""


@pytest.fixture(scope="module")
def on_cpu(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("on_cpu")
    (folder / "config.json").write_bytes((fleet.model / "config.json").read_bytes())
    pools = "".join(
        CPU_POOL.format(role=role, block=block, threads=threads)
        for role, block, threads in (("prefill", 64, 2), ("decode", 128, 1))
    )
    (folder / "fleet.toml").write_text(cpu_fleet.HEAD + cpu_fleet.LINK + pools)
    run("solve", folder / "fleet.toml", "--out", folder / "placement.toml")
    return folder


def run(*words: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deeplink.cli", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == code, done.stderr
    return done


def test_up_starts_a_placement_and_ends_it(fleet: Fleet, on_cpu: Path) -> None:
    done = run("up", on_cpu / "placement.toml", "--once", "--json", "--model", fleet.model, "--folder", on_cpu / "run")
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert [request["prompt"] for request in report["requests"]] == [40, 300]
    for request in report["requests"]:
        assert (request["path"], request["failed"], request["tokens"]) == ("handoff", "", 8)
    for url in (report["router"], *report["engines"].values()):
        with pytest.raises(LocalError, match="refused"):
            client.get(f"{url}/health")
    assert len(list((on_cpu / "run").glob("*.log"))) == 3


@pytest.mark.long
def test_up_says_which_engine_did_not_start(fleet: Fleet, on_cpu: Path) -> None:
    text = (on_cpu / "placement.toml").read_text().replace('"--enforce-eager"', '"--no-such-flag"', 1)
    (on_cpu / "wrong.toml").write_text(text)
    done = run("up", on_cpu / "wrong.toml", "--once", "--model", fleet.model, code=1)
    assert "-prefill-tp1" in done.stderr or "decode-tp1" in done.stderr
    assert "ended with status 2" in done.stderr
    assert "--no-such-flag" in done.stderr


@pytest.mark.long
def test_measure_profiles_a_real_engine(fleet: Fleet, on_cpu: Path) -> None:
    engine = fleet.prepare("measured", "", block_size=128)
    fleet.start(engine)
    try:
        sizes = ("--prompts", "32,64,128", "--batches", "1,2", "--contexts", "64,256", "--repeats", "2")
        rates = on_cpu / "rates.csv"
        run("measure", engine.url, "--chip", "decode threads", "--model", "smollm2", *sizes, "--out", rates)
    finally:
        engine.process.stop()
    fleet_file = on_cpu / "measured.toml"
    fleet_file.write_text((on_cpu / "fleet.toml").read_text() + '[[rates]]\ntable = "rates.csv"\n')
    placed = json.loads(run("solve", fleet_file, "--json").stdout)
    kinds = {engine["role"]: {rate["kind"] for rate in engine["rates"]} for engine in placed["engines"]}
    assert kinds["decode"] <= {"measured", "interpolated"}
