"""What of vLLM's settings this release hands over with; the others are refused at start-up, by their names."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from deeplink.errors import ConfigError
from deeplink.kvconnector.negotiate import FULL, SLIDING

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

KINDS = {"FullAttentionSpec": FULL, "SlidingWindowSpec": SLIDING}
"""vLLM's kinds of cache and ours."""


def check(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, speculation: Collection[str]) -> None:
    """`speculation` are the ways to speculate that this vLLM is tested with. Raises ConfigError."""
    check_parallel(vllm_config.parallel_config)
    for group in kv_cache_config.kv_cache_groups:
        # Exactly these kinds: others derive from them and mean something else (latent vectors, states, chunks).
        kind = type(group.kv_cache_spec).__name__
        if kind not in KINDS:
            raise ConfigError(
                f"this release hands over the caches of {', '.join(KINDS)} only",
                field="kind of KV cache",
                ours=kind,
                theirs=", ".join(KINDS),
            )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise ConfigError(
            "a contract states the cache's scales, which are not known before the first prompt",
            field="calculate-kv-scales",
            ours="True",
            theirs="False",
            remedy="use a checkpoint that has them, or none",
        )
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in speculation:
        raise ConfigError(
            "this release does not hand over the cache that speculation may have of its own, and without it the decode "
            "engine would speculate from nothing",
            field="speculative-config.method",
            ours=str(speculative.method),
            theirs=", ".join(("none", *speculation)),
            remedy="start both engines without it",
        )


def check_parallel(parallel: ParallelConfig) -> None:
    """Known before an engine is made. Raises ConfigError."""
    # Where the model has no experts, each replica takes itself for the only one, but for its index.
    replicas = max(parallel.data_parallel_size, 1 + getattr(parallel, "data_parallel_index", 0))
    for field, value, why, remedy in (
        # On CPU, the only place where this could be tried, vLLM 0.32 itself ends at the first request with a pipeline.
        (
            "pipeline-parallel-size",
            parallel.pipeline_parallel_size,
            "a pipeline could not be tried yet",
            "use tensor parallelism",
        ),
        (
            "data-parallel-size",
            replicas,
            "vLLM chooses the replica after the router has chosen whose cache is handed over",
            "start one engine for each replica; the router shares requests among engines",
        ),
        (
            "decode-context-parallel-size",
            parallel.decode_context_parallel_size,
            "a prompt's tokens would be split over ranks",
            "use tensor parallelism",
        ),
        (
            "prefill-context-parallel-size",
            parallel.prefill_context_parallel_size,
            "a prompt's tokens would be split over ranks",
            "use tensor parallelism",
        ),
    ):
        if value != 1:
            raise ConfigError(
                f"this release hands over only with a {field} of 1: {why}",
                field=field,
                ours=str(value),
                theirs="1",
                remedy=remedy,
            )
