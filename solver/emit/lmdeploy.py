"""LMDeploy with deeplink in it, as `deeplink serve lmdeploy` starts it: on the device of the host, and with deeplink as
its way to migrate where it hands over.

Its settings are in the file that a variable names. The control endpoint is on the server's port + 1000.
"""

from __future__ import annotations

from deeplink.solver.emit.asked import Asked, cache
from deeplink.solver.emit.members import Member
from deeplink.solver.placement import Placement

_CACHE = {"bfloat16": "bfloat16", "float16": "float16"}
_ROLES = {"prefill": "Prefill", "decode": "Decode"}
_PIECE = 8192
"""Tokens of a prompt that LMDeploy computes at once, unless it is told."""


def words(placement: Placement, member: Member, asked: Asked) -> list[str]:
    """Raises SolverError for a cache that LMDeploy cannot keep."""
    engine = member.engine
    checkpoint = placement.checkpoint or placement.model
    found = ["python3", "-m", "deeplink.cli", "serve", "lmdeploy", checkpoint]
    found += ["--model-name", placement.model] if checkpoint != placement.model else []
    found += ["--server-name", asked.host, "--server-port", str(asked.port), "--tp", str(engine.tp)]
    # Its cache has the elements that the model is computed in.
    found += ["--dtype", cache(member, _CACHE)]
    found += ["--max-batch-size", str(engine.max_num_seqs)] if engine.max_num_seqs else []
    piece = engine.max_num_batched_tokens
    if engine.role == "prefill":
        # It refuses prompts that it would have to compute in pieces.
        piece = _room(max((max(bucket.longest, bucket.prompt) for bucket in placement.buckets), default=0.0))
    found += ["--max-prefill-token-num", str(piece)] if piece else []
    if role := _ROLES.get(engine.role):
        found += ["--role", role, "--migration-backend", "deeplink"]
    return found


def _room(longest: float) -> int:
    """What LMDeploy takes by itself, as often doubled as prompts of this length need."""
    size = _PIECE
    while size < longest:
        size *= 2
    return size
