"""The command line of one engine: vLLM with deeplink's plugin."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from deeplink.errors import SolverError
from deeplink.solver.emit import nodes
from deeplink.solver.emit.members import Member
from deeplink.solver.emit.nodes import Node
from deeplink.solver.placement import Placement

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


def command(
    placement: Placement,
    member: Member,
    *,
    host: str,
    port: int,
    config: str,
    pinned: bool = True,
    node: Node | None = None,
) -> Command:
    """`config` is the path of its deeplink.toml. With `pinned` it is told which of its host's chips are its own; in a
    container it sees no others. `node` is which of the engine's hosts this is for; one host needs none. Raises
    SolverError for a cache that vLLM cannot keep, and for an engine of several hosts where there is only one."""
    engine = member.engine
    if node is None:
        nodes.require_one_host(member)
    cache = _CACHE.get(engine.kv_dtype)
    if cache is None:
        raise SolverError(
            f"vLLM keeps no cache of {engine.kv_dtype}",
            field="kv_dtype",
            ours=engine.kv_dtype,
            theirs=", ".join(_CACHE),
            remedy="choose another kv_dtype for the pool",
        )
    checkpoint = placement.checkpoint or placement.model
    words = ["vllm", "serve", checkpoint, "--host", host, "--port", str(port)]
    words += ["--served-model-name", placement.model] if checkpoint != placement.model else []
    words += ["--tensor-parallel-size", str(engine.tp), "--kv-cache-dtype", cache]
    if engine.max_num_seqs:
        words += ["--max-num-seqs", str(engine.max_num_seqs)]
    if engine.max_num_batched_tokens:
        # vLLM wants a step to have room for all of its sequences at least.
        words += ["--max-num-batched-tokens", str(max(engine.max_num_batched_tokens, engine.max_num_seqs))]
    if node is not None:
        words += nodes.flags(member, node)
    words += ["--platform", "deeplink", "--deeplink-role", engine.role, "--deeplink-config", config]
    variables = [(member.visible, ",".join(map(str, member.chips)))] if member.visible and pinned else []
    variables += sorted(engine.variables.items())
    return Command(member.name, (*words, *engine.flags), tuple(variables))
