"""SGLang, with deeplink's plugin where it hands over. Without a role it is SGLang as it is.

The plugin is found by SGLang itself, and its settings are in the file that a variable names. The control endpoint is on
the API's port + 1000.
"""

from __future__ import annotations

from deeplink.solver.emit.asked import Asked, cache
from deeplink.solver.emit.members import Member
from deeplink.solver.placement import Placement

_CACHE = {
    "float32": "auto",
    "bfloat16": "auto",
    "float16": "auto",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
}
_PAGE = 128
"""A piece of a prompt is whole pages to SGLang; all page sizes that chips are known to have divide this."""
VARIABLES = (("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "false"),)
"""Else it generates a token for whoever asks for its health, which takes long while it computes a long prompt."""
_ON_PROCESSOR = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule"),
    # Its loop would keep a core busy when there is nothing to do.
    "--sleep-on-idle",
)


def words(placement: Placement, member: Member, asked: Asked) -> list[str]:
    """Raises SolverError for a cache that SGLang cannot keep."""
    engine = member.engine
    kept = cache(member, _CACHE)
    checkpoint = placement.checkpoint or placement.model
    found = ["python3", "-m", "sglang.launch_server", "--model-path", checkpoint]
    found += ["--served-model-name", placement.model] if checkpoint != placement.model else []
    found += ["--host", asked.host, "--port", str(asked.port), "--tensor-parallel-size", str(engine.tp)]
    # A cache of the model's own elements has those that the model is computed in.
    found += ["--dtype", engine.kv_dtype] if kept == "auto" else ["--kv-cache-dtype", kept]
    found += list(_ON_PROCESSOR) if member.processor else []
    if engine.max_num_seqs:
        found += ["--max-running-requests", str(engine.max_num_seqs)]
    if engine.max_num_batched_tokens:
        # The rest of a step is for the sequences that decode, as planned.
        piece = max(engine.max_num_batched_tokens // _PAGE, 1) * _PAGE
        found += ["--chunked-prefill-size", str(piece), "--enable-mixed-chunk"]
    if engine.role == "both":
        return found
    found += ["--disaggregation-mode", engine.role, "--disaggregation-transfer-backend", "deeplink"]
    if member.processor:
        found.append("--skip-server-warmup")
        if engine.role == "decode":
            # The other way to keep a request that has to make room needs memory that CUDA has pinned.
            found += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
    return found
