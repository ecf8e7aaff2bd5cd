"""vLLM with deeplink's plugin."""

from __future__ import annotations

from deeplink.solver.emit import nodes
from deeplink.solver.emit.asked import Asked, cache
from deeplink.solver.emit.members import Member
from deeplink.solver.placement import Placement

_CACHE = {
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "bfloat16": "auto",
    "float16": "auto",
    "float32": "auto",
}


def words(placement: Placement, member: Member, asked: Asked) -> list[str]:
    """Raises SolverError for a cache that vLLM cannot keep."""
    engine = member.engine
    kept = cache(member, _CACHE)
    checkpoint = placement.checkpoint or placement.model
    found = ["vllm", "serve", checkpoint, "--host", asked.host, "--port", str(asked.port)]
    found += ["--served-model-name", placement.model] if checkpoint != placement.model else []
    found += ["--tensor-parallel-size", str(engine.tp), "--kv-cache-dtype", kept]
    if engine.max_num_seqs:
        found += ["--max-num-seqs", str(engine.max_num_seqs)]
    if engine.max_num_batched_tokens:
        # vLLM wants a step to have room for all of its sequences at least.
        found += ["--max-num-batched-tokens", str(max(engine.max_num_batched_tokens, engine.max_num_seqs))]
    if asked.node is not None:
        found += nodes.flags(member, asked.node)
    return [*found, "--platform", "deeplink", "--deeplink-role", engine.role, "--deeplink-config", asked.config]
