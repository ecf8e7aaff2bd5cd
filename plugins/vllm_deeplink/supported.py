"""What of vLLM's settings this release hands over with; the others are refused at start-up, by their names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.errors import ConfigError
from deeplink.kvconnector.contracts.negotiate import FULL, SLIDING

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from vllm_deeplink.versions.version import Version

KINDS = {"FullAttentionSpec": FULL, "SlidingWindowSpec": SLIDING}
"""vLLM's kinds of cache and ours."""

NOT_COMPILED = 0
"""vLLM's CompilationMode.NONE: eager mode, or LoRA on a CPU."""


def check(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, version: Version, *, cpu: bool) -> None:
    """`cpu`: whether it computes on one. Raises ConfigError."""
    check_parallel(vllm_config, version, cpu=cpu)
    if (parts := vllm_config.parallel_config.pipeline_parallel_size) > 1 and len(kv_cache_config.kv_cache_groups) > 1:
        why = "a pipeline of a model with several cache groups was not tried"
        raise _refused("pipeline-parallel-size", parts, "1", why, "use tensor parallelism")
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
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        raise ConfigError(
            "an engine that sleeps gives away the memory of its cache, with what is being handed over",
            field="enable-sleep-mode",
            ours="True",
            theirs="False",
            remedy="start this engine without it",
        )
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in version.speculation:
        raise ConfigError(
            "this release does not hand over the cache that speculation may have of its own, and without it the decode "
            "engine would speculate from nothing",
            field="speculative-config.method",
            ours=str(speculative.method),
            theirs=", ".join(("none", *version.speculation)),
            remedy="start both engines without it",
        )


def check_parallel(vllm_config: VllmConfig, version: Version, *, cpu: bool) -> None:
    """Known before an engine is made. Raises ConfigError."""
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        _check_pipeline(vllm_config, version, cpu)
    if parallel.nnodes > 1:
        _check_nodes(parallel, version)
    for field, value, why, remedy in (
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
    if size > 1 and not version.replicas:
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


def _check_pipeline(vllm_config: VllmConfig, version: Version, cpu: bool) -> None:
    """The model runner keeps what one part of a pipeline sends to the next in tensors that it makes while it warms up.
    On a CPU vLLM (0.27 to 0.32) leaves that out where nothing is compiled, and its pipeline ends at the first request,
    with ``assert self.intermediate_tensors is not None`` in ``GPUModelRunner.sync_and_gather_intermediate_tensors``.
    """
    size = vllm_config.parallel_config.pipeline_parallel_size
    if not version.pipelines:
        why = f"pipelines were not tried with vLLM {version.name}"
        raise _refused("pipeline-parallel-size", size, "1", why, "use tensor parallelism")
    if vllm_config.parallel_config.tensor_parallel_size > 1:
        why = "a pipeline of parts with several ranks each was not tried"
        raise _refused("pipeline-parallel-size", size, "1", why, "use tensor parallelism alone")
    if cpu and int(vllm_config.compilation_config.mode) == NOT_COMPILED:
        raise ConfigError(
            "on CPUs vLLM's own pipeline ends at the first request where nothing is compiled, as in eager mode and "
            "with LoRA",
            field="pipeline-parallel-size",
            ours=f"{size}, not compiled",
            theirs="1, or compiled",
            remedy="start it without --enforce-eager and --enable-lora, or use tensor parallelism",
        )


def _check_nodes(parallel: ParallelConfig, version: Version) -> None:
    whole = "use an engine of one host"
    if not version.nodes:
        why = f"ranks on several hosts were not tried with vLLM {version.name}"
        raise _refused("nnodes", parallel.nnodes, "1", why, whole)
    for field, value, only in (
        ("pipeline-parallel-size", parallel.pipeline_parallel_size, 1),
        ("data-parallel-size", parallel.data_parallel_size, 1),
        ("distributed-executor-backend", parallel.distributed_executor_backend, "mp"),
    ):
        if value != only:
            why = "ranks on several hosts were tried only as one group of tensor parallelism, each started by itself"
            raise _refused(field, value, only, why, whole)


def _refused(field: str, ours: object, theirs: object, why: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"this release hands over only with a {field} of {theirs}: {why}",
        field=field,
        ours=str(ours),
        theirs=str(theirs),
        remedy=remedy,
    )
