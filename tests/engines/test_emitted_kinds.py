"""Placements of engines of unlike kinds: every command by its engine's own parser, and some that are started."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cpu_fleet
import lmdeploy_engine
import pytest
import sglang_engine
import yaml
from described import of_kinds, write
from fleet import Fleet, http

from deeplink.chips.catalogue import PROFILES
from deeplink.local import lmdeploy, sglang, step, trial, up
from deeplink.local.environment import Environment
from deeplink.solver import emit
from deeplink.solver.fleets import fleetfile
from deeplink.solver.kinds import Kind
from deeplink.solver.place import place
from deeplink.solver.placement import Placement

BEGIN: Mapping[Kind, list[str]] = {
    "sglang": ["-m", "sglang.launch_server"],
    "lmdeploy": ["-m", "deeplink.cli", "serve", "lmdeploy"],
}
"""The words between an engine's Python and its options."""
SGLANG = """
import argparse, json, sys
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

load_plugins()
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
for words in json.load(sys.stdin):
    args = ServerArgs.from_cli_args(parser.parse_args(words))
    print(json.dumps([args.model_path, args.port, args.tp_size, args.disaggregation_mode]))
"""
LMDEPLOY = """
import json, sys
from lmdeploy_deeplink import engine

engine.install()
from lmdeploy.cli.cli import CLI
from lmdeploy.cli.serve import SubCliServe

CLI.add_parsers()
SubCliServe.add_parsers()
for words in json.load(sys.stdin):
    args = CLI.parser.parse_args(["serve", "api_server", *words, "--backend", "deeplink"])
    assert args.role == "Hybrid" or args.migration_backend == "deeplink"
    print(json.dumps([args.model_path, args.server_port, args.tp, args.role]))
"""
SECONDS = 200


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Placement:
    """Engines of every kind in every role on every chip that there is a profile of."""
    split = place(fleetfile.load(write(tmp_path_factory.mktemp("every"))))
    return of_kinds(split, tuple(profile.title for profile in PROFILES))


def commands(placement: Placement, kind: Kind) -> list[list[str]]:
    """The options of all engines of a kind, as each of the formats has them."""
    script = emit.files(placement, "local")["engines.sh"]
    lines = [shlex.split(line.partition(" > ")[0]) for line in script.splitlines() if line.endswith("2>&1 &")]
    services = yaml.safe_load(emit.files(placement, "compose")["compose.yaml"])["services"]
    lines += [service["entrypoint"] for name, service in services.items() if name != "router"]
    for one in yaml.safe_load_all(emit.files(placement, "k8s")["placement.yaml"]):
        if one["kind"] == "Deployment" and one["metadata"]["name"] != "deeplink-router":
            lines.append(one["spec"]["template"]["spec"]["containers"][0]["args"])
    lines += [one["words"] for one in json.loads(emit.files(placement, "ray")["ray.json"])["engines"]]
    begin = BEGIN[kind]
    found = [
        line[at + len(begin) :]
        for line in lines
        for at in range(len(line))
        if list(line[at : at + len(begin)]) == begin
    ]
    assert len(found) == 4 * sum(engine.kind == kind for engine in placement.engines)
    return found


def parse(
    program: str, inside: Environment, env: dict[str, str], given: list[list[str]]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [inside.python, "-c", program],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=step.clean_environ() | env,
        cwd=inside.folder,  # not a checkout, whose folders would be taken for packages
        check=False,
    )


@dataclass(frozen=True)
class Parsed:
    """The commands of a kind, and what its parser made of them and of one more that is wrong."""

    given: list[list[str]]
    done: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def parsed(fleet: Fleet, every: Placement) -> dict[Kind, Parsed]:
    """Side by side, as importing the engines is most of it."""
    programs: dict[Kind, tuple[str, Environment, dict[str, str]]] = {
        "sglang": (SGLANG, sglang_engine.installed(), sglang.on_processor(fleet.overlay)),
        "lmdeploy": (LMDEPLOY, lmdeploy_engine.installed(), lmdeploy.on_processor(fleet.overlay)),
    }
    given = {kind: commands(every, kind) for kind in programs}
    with ThreadPoolExecutor(len(programs)) as pool:
        running = {
            kind: pool.submit(parse, *how, [*given[kind], [*given[kind][0], "--no-such-flag"]])
            for kind, how in programs.items()
        }
        return {kind: Parsed(given[kind], one.result(SECONDS)) for kind, one in running.items()}


def test_sglang_parses_every_command(parsed: dict[Kind, Parsed]) -> None:
    found = parsed["sglang"]
    roles = check(found, {"--model-path": 0, "--port": 1, "--tensor-parallel-size": 2})
    assert roles == [_after(words, "--disaggregation-mode") or "null" for words in found.given]


def test_lmdeploy_parses_every_command(parsed: dict[Kind, Parsed]) -> None:
    found = parsed["lmdeploy"]
    roles = check(found, {"--server-port": 1, "--tp": 2})
    assert roles == [_after(words, "--role") or "Hybrid" for words in found.given]


def check(found: Parsed, flags: Mapping[str, int]) -> list[str]:
    """That what was parsed is what was written, and what is wrong refused; the roles."""
    assert found.done.returncode == 2, found.done.stderr[-3000:]
    assert "--no-such-flag" in found.done.stderr
    parsed = [json.loads(line) for line in found.done.stdout.splitlines() if line.startswith("[")]
    assert len(parsed) == len(found.given) > 100
    for words, values in zip(found.given, parsed, strict=True):
        assert {flag: str(values[at]) for flag, at in flags.items()} == {flag: _after(words, flag) for flag in flags}
    return [values[3] for values in parsed]


def _after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1] if flag in words else ""


POOL = """\
[[pools]]
name = "{role}"
engine = "{kind}"
chip = "{role} threads"
count = 1
per_host = 1
roles = ["{role}"]
kv_dtype = "{dtype}"
{more}
[[chips]]
name = "{role} threads"
profile = "cpu-x86"
tflops = 2
memory_gb = 4
memory_gb_per_s = 100
source = "more than there can be"
"""
MORE: Mapping[Kind, str] = {
    "vllm": """\
layout = "vllm-cpu-vec"
flags = ["--dtype", "{dtype}", "--block-size", "128", "--enforce-eager", "--max-model-len", "1024",
         "--kv-cache-memory-bytes", "314572800"]
env = {{VLLM_CPU_OMP_THREADS_BIND = "nobind", OMP_NUM_THREADS = "1"}}
""",
    "sglang": """\
flags = ["--page-size", "16", "--max-total-tokens", "4096", "--mem-fraction-static", "0.3", "--context-length", "1024"]
env = {{OMP_NUM_THREADS = "1"}}
""",
    "lmdeploy": """\
flags = ["--cache-block-seq-len", "64", "--num-gpu-blocks", "64", "--session-len", "1024"]
env = {{OMP_NUM_THREADS = "1"}}
""",
}


def solved(folder: Path, model: Path, dtype: str, **pools: Kind) -> Placement:
    """Of one engine for each role."""
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    text = cpu_fleet.HEAD + (cpu_fleet.LINK if len(pools) > 1 else "")
    for role, kind in pools.items():
        text += POOL.format(role=role, kind=kind, dtype=dtype, more=MORE[kind].format(dtype=dtype))
    (folder / "fleet.toml").write_text(text)
    found = place(fleetfile.load(folder / "fleet.toml"))
    assert {engine.role: engine.kind for engine in found.engines} == pools
    return found


def asked(url: str, placement: Placement, prompt: list[int] | str, **more: Any) -> Any:
    body = {"model": placement.model, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    answer = http(f"{url}/v1/completions", {**body, **more}, seconds=120)
    assert answer.status == 200, answer.data
    return answer


@pytest.mark.long
def test_up_starts_sglang_that_prefills_for_vllm_and_the_answer_is_right(fleet: Fleet, tmp_path: Path) -> None:
    """In float32 the tokens are those that the decode engine computes alone, whatever the order of its sums."""
    placement = solved(tmp_path, fleet.model, "float32", prefill="sglang", decode="vllm")
    options = up.Options(model=fleet.model, folder=tmp_path / "run")
    with up.running(placement, options, print) as running:
        checked = up.check(running, 512)
        assert [(one.prompt, one.path, one.tokens, one.failed) for one in checked] == [
            (40, "handoff", 8, ""),
            (300, "handoff", 8, ""),
        ]
        (decode,) = (url for name, url in running.urls.items() if "decode" in name)
        for seed, size in ((3, 5), (4, 129), (5, 600)):
            prompt = list(trial.token_ids(size, seed))
            handed = asked(running.router_url, running.placement, prompt)
            assert handed.headers["x-deeplink-path"] == "handoff"
            alone = asked(decode, running.placement, prompt, cache_salt=f"alone {seed}")
            assert handed.json["choices"][0]["text"] == alone.json["choices"][0]["text"]
            assert handed.json["usage"]["completion_tokens"] == 24


@pytest.mark.long
@pytest.mark.parametrize(("prefill", "decode"), [("vllm", "lmdeploy"), ("lmdeploy", "sglang")])
def test_up_starts_other_pairs(fleet: Fleet, tmp_path: Path, prefill: Kind, decode: Kind) -> None:
    placement = solved(tmp_path, fleet.model, "float16", prefill=prefill, decode=decode)
    with up.running(placement, up.Options(model=fleet.model, folder=tmp_path / "run"), print) as running:
        checked = up.check(running, 512)
        assert [(one.prompt, one.path, one.tokens, one.failed) for one in checked] == [
            (40, "handoff", 8, ""),
            (300, "handoff", 8, ""),
        ]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sglang", "lmdeploy"])
def test_up_starts_an_engine_that_serves_alone(fleet: Fleet, tmp_path: Path, kind: Kind) -> None:
    dtype = "float16" if kind == "lmdeploy" else "float32"
    placement = solved(tmp_path, fleet.model, dtype, both=kind)
    with up.running(placement, up.Options(model=fleet.model, folder=tmp_path / "run"), print) as running:
        checked = up.check(running, 512)
        assert [(one.prompt, one.path, one.tokens, one.failed) for one in checked] == [
            (40, "plain", 8, ""),
            (300, "plain", 8, ""),
        ]
