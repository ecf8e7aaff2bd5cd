"""A placement as what starts it on one machine: engine commands, and the router's deeplink.toml.

Each engine is a vLLM process with deeplink's plugin. Chips are given out in order within a pool. Where a placement has
pools on several machines the commands are the same, and the addresses are to be put in.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from deeplink.errors import SolverError
from deeplink.solver import catalogue
from deeplink.solver.placement import Engine, Placement

FIRST_PORT = 8100
ROUTER_PORT = 8000
_VISIBLE = {"NVIDIA": "CUDA_VISIBLE_DEVICES", "Huawei": "ASCEND_RT_VISIBLE_DEVICES"}
_CACHE = {
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "bfloat16": "auto",
    "float16": "auto",
    "float32": "auto",
}


@dataclass(frozen=True, slots=True)
class Command:
    """One engine's process: `variables` of its environment, and its words."""

    name: str
    words: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        before = [f"{name}={shlex.quote(value)}" for name, value in self.variables]
        return " ".join([*before, *(shlex.quote(word) for word in self.words)])


def commands(placement: Placement, *, host: str = "127.0.0.1", first_port: int = FIRST_PORT) -> tuple[Command, ...]:
    """One for each engine. Raises SolverError for a placement that has none, and for a cache that vLLM cannot keep."""
    if not placement.engines:
        raise SolverError(
            "there is nothing to start: the placement has no engines", remedy="solve a fleet that has one"
        )
    found = []
    port = first_port
    next_chip: dict[str, int] = {}
    for engine in placement.engines:
        for index in range(engine.count):
            chips = range(next_chip.get(engine.pool, 0), next_chip.get(engine.pool, 0) + engine.tp)
            next_chip[engine.pool] = chips.stop
            found.append(_command(placement, engine, index, host, port, chips))
            port += 1
    return tuple(found)


def name(engine: Engine, index: int) -> str:
    return f"{engine.name}-{index}" if engine.count > 1 else engine.name


def _command(placement: Placement, engine: Engine, index: int, host: str, port: int, chips: range) -> Command:
    cache = _CACHE.get(engine.kv_dtype)
    if cache is None:
        raise SolverError(
            f"vLLM keeps no cache of {engine.kv_dtype}",
            field="kv_dtype",
            ours=engine.kv_dtype,
            theirs=", ".join(_CACHE),
            remedy="choose another kv_dtype for the pool",
        )
    words = ["vllm", "serve", placement.model, "--host", host, "--port", str(port)]
    words += ["--tensor-parallel-size", str(engine.tp), "--kv-cache-dtype", cache]
    if engine.max_num_seqs:
        words += ["--max-num-seqs", str(engine.max_num_seqs)]
    if engine.max_num_batched_tokens:
        # vLLM wants a step to have room for all of its sequences at least.
        words += ["--max-num-batched-tokens", str(max(engine.max_num_batched_tokens, engine.max_num_seqs))]
    words += ["--platform", "deeplink", "--deeplink-role", engine.role, "--deeplink-config", "deeplink.toml"]
    variable = _VISIBLE.get(catalogue.sheets().get(engine.chip, {}).get("vendor", ""))
    variables = ((variable, ",".join(map(str, chips))),) if variable else ()
    return Command(name(engine, index), tuple(words), variables)


def router(placement: Placement, *, host: str = "127.0.0.1", first_port: int = FIRST_PORT) -> str:
    """deeplink.toml for the router and all engines."""
    lines = [
        f"# {placement.name}: {placement.model}, {placement.objective} {placement.value:g} {placement.unit}",
        "[router]",
        f"port = {ROUTER_PORT}",
    ]
    port = first_port
    for engine in placement.engines:
        for index in range(engine.count):
            lines += ["", "[[engines]]", f'name = "{name(engine, index)}"', f'url = "http://{host}:{port}"']
            port += 1
    return "\n".join(lines) + "\n"


def local(placement: Placement) -> dict[str, str]:
    """Files by name: deeplink.toml, and engines.sh, which starts every engine and waits for them."""
    script = [
        "#!/bin/sh",
        "# Starts the engines of the placement; the router is started with: deeplink router",
        "set -eu",
    ]
    script += ["trap 'kill 0' INT TERM"]
    script += [f"{command} > {shlex.quote(command.name + '.log')} 2>&1 &" for command in commands(placement)]
    script += ["wait"]
    return {"deeplink.toml": router(placement), "engines.sh": "\n".join(script) + "\n"}
