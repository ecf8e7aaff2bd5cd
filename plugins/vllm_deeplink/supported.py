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


def check(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    speculation: Collection[str],
    *,
    replicas: bool,
    nodes: bool,
) -> None:
    """`speculation` are the ways to speculate that this vLLM is tested with; `replicas` and `nodes` say whether it is
    with several of them. Raises ConfigError."""
    check_parallel(vllm_config.parallel_config, replicas=replicas, nodes=nodes)
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
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        raise ConfigError(
            "a contract states the weights that an engine was started with; others' cache would be taken for theirs",
            field="weight-transfer-config",
            ours="set",
            theirs="not set",
            remedy="start this engine without it, and again for other weights",
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


def check_parallel(parallel: ParallelConfig, *, replicas: bool, nodes: bool) -> None:
    """Known before an engine is made. `replicas` and `nodes`: whether this vLLM is tested with several replicas, and
    with ranks on several hosts. Raises ConfigError."""
    _check_nodes(parallel, nodes)
    for field, value, why, remedy in (
        # On CPU, the only place where this could be tried, vLLM 0.32 itself ends at the first request with a pipeline.
        (
            "pipeline-parallel-size",
            parallel.pipeline_parallel_size,
            "a pipeline could not be tried yet",
            "use tensor parallelism",
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
            raise _refused(field, value, "1", why, remedy)
    # Where the model has no experts, each replica takes itself for the only one, but for its index.
    size = max(parallel.data_parallel_size, 1 + getattr(parallel, "data_parallel_index", 0))
    one_each = "start one engine for each replica; the router shares requests among engines"
    if size > 1 and not replicas:
        raise _refused("data-parallel-size", size, "1", "several replicas were not tried with this vLLM", one_each)
    if size > 1 and getattr(parallel, "is_moe_model", None) is not False:
        why = "replicas of a model with experts take their steps together, which was not tried"
        raise _refused("data-parallel-size", size, "1", why, "use tensor parallelism")
    for field, value, only in (
        ("data-parallel-external-lb", parallel.data_parallel_external_lb, False),
        ("data-parallel-hybrid-lb", parallel.data_parallel_hybrid_lb, False),
        ("data-parallel-backend", parallel.data_parallel_backend, "mp"),
        ("data-parallel-size-local", parallel.data_parallel_size_local, parallel.data_parallel_size),
    ):
        if size > 1 and value != only:
            raise _refused(field, value, only, "replicas were tried only behind one API on one host", one_each)


def _check_nodes(parallel: ParallelConfig, tested: bool) -> None:
    count = parallel.nnodes
    if count == 1:
        return
    whole = "use an engine of one host"
    if not tested:
        raise _refused("nnodes", count, 1, "several hosts were not tried with this vLLM", whole)
    if parallel.data_parallel_size > 1:
        raise _refused(
            "data-parallel-size", parallel.data_parallel_size, 1, "replicas on several hosts were not tried", whole
        )
    if parallel.distributed_executor_backend != "mp":
        backend = parallel.distributed_executor_backend
        raise _refused("distributed-executor-backend", backend, "mp", "several hosts were tried only with it", whole)


def _refused(field: str, ours: object, theirs: object, why: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"this release hands over only with a {field} of {theirs}: {why}",
        field=field,
        ours=str(ours),
        theirs=str(theirs),
        remedy=remedy,
    )
