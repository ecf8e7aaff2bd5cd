"""What is refused at start-up, by the name of vLLM's setting."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deeplink.errors import ConfigError
from vllm_deeplink import supported
from vllm_deeplink.versions import v0_27, v0_29, v0_32
from vllm_deeplink.versions.version import Version


def settings(**changes: Any) -> tuple[Any, Any]:
    parallel = {
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "data_parallel_index": 0,
        "data_parallel_external_lb": False,
        "data_parallel_hybrid_lb": False,
        "data_parallel_backend": "mp",
        "is_moe_model": False,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "nnodes": 1,
        "distributed_executor_backend": "mp",
    }
    method, kind, dynamic, transfer = (
        changes.pop(name, None) for name in ("method", "kind", "calculate_kv_scales", "weight_transfer_config")
    )
    local = {"data_parallel_size_local": changes.get("data_parallel_size", 1)}
    compiled, sleeps = changes.pop("compiled", True), changes.pop("enable_sleep_mode", False)
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(mode=3 if compiled else 0),
        parallel_config=SimpleNamespace(**{**parallel, **local, **changes}),
        model_config=SimpleNamespace(enable_sleep_mode=sleeps),
        cache_config=SimpleNamespace(calculate_kv_scales=bool(dynamic)),
        speculative_config=SimpleNamespace(method=method) if method else None,
        weight_transfer_config=transfer,
    )
    kinds = [kind] if kind else ["FullAttentionSpec", "SlidingWindowSpec"]
    groups = [SimpleNamespace(kv_cache_spec=type(name, (), {})()) for name in kinds]
    return config, SimpleNamespace(kv_cache_groups=groups)


def test_what_is_tested_passes() -> None:
    supported.check(*settings(), v0_27.VERSION, cpu=True)
    supported.check(*settings(method="ngram"), v0_32.VERSION, cpu=True)
    supported.check(*settings(pipeline_parallel_size=2), v0_32.VERSION, cpu=True)
    supported.check(*settings(pipeline_parallel_size=2, compiled=False), v0_32.VERSION, cpu=False)
    supported.check(*settings(nnodes=2), v0_32.VERSION, cpu=True)
    # As the process that starts them sees replicas, and as each of them sees itself.
    supported.check(*settings(data_parallel_size=4), v0_32.VERSION, cpu=True)
    supported.check(*settings(data_parallel_index=3), v0_32.VERSION, cpu=True)


@pytest.mark.parametrize(
    ("changes", "field", "ours"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline-parallel-size", "2"),  # of versions that it was not tested with
        ({"nnodes": 2}, "nnodes", "2"),
        ({"data_parallel_size": 4}, "data-parallel-size", "4"),
        ({"data_parallel_index": 1}, "data-parallel-size", "2"),
        ({"decode_context_parallel_size": 2}, "decode-context-parallel-size", "2"),
        ({"prefill_context_parallel_size": 2}, "prefill-context-parallel-size", "2"),
        ({"kind": "MambaSpec"}, "kind of KV cache", "MambaSpec"),
        ({"kind": "MLAAttentionSpec"}, "kind of KV cache", "MLAAttentionSpec"),
        ({"kind": "ChunkedLocalAttentionSpec"}, "kind of KV cache", "ChunkedLocalAttentionSpec"),
        ({"calculate_kv_scales": True}, "calculate-kv-scales", "True"),
        ({"weight_transfer_config": object()}, "weight-transfer-config", "set"),
        ({"enable_sleep_mode": True}, "enable-sleep-mode", "True"),
        ({"method": "ngram"}, "speculative-config.method", "ngram"),  # of versions that it was not tested with
        ({"method": "eagle"}, "speculative-config.method", "eagle"),
        ({"method": "mtp"}, "speculative-config.method", "mtp"),
        ({"method": "draft_model"}, "speculative-config.method", "draft_model"),
    ],
)
def test_what_is_not_is_refused_by_name(changes: dict[str, Any], field: str, ours: str) -> None:
    with pytest.raises(ConfigError) as caught:
        supported.check(*settings(**changes), v0_27.VERSION, cpu=True)
    reason = caught.value.reason()
    assert (reason.field, reason.ours) == (field, ours)
    assert reason.theirs


@pytest.mark.parametrize(
    ("changes", "field", "ours"),
    [
        ({"is_moe_model": True}, "data-parallel-size", "2"),
        ({"is_moe_model": None}, "data-parallel-size", "2"),  # it is not known
        ({"data_parallel_external_lb": True}, "data-parallel-external-lb", "True"),
        ({"data_parallel_hybrid_lb": True}, "data-parallel-hybrid-lb", "True"),
        ({"data_parallel_backend": "ray"}, "data-parallel-backend", "ray"),
        ({"data_parallel_size_local": 1}, "data-parallel-size-local", "1"),
    ],
)
def test_replicas_that_were_not_tried_are_refused_by_name(changes: dict[str, Any], field: str, ours: str) -> None:
    with pytest.raises(ConfigError) as caught:
        supported.check_parallel(settings(data_parallel_size=2, **changes)[0], v0_32.VERSION, cpu=True)
    reason = caught.value.reason()
    assert (reason.field, reason.ours) == (field, ours)
    assert reason.remedy
    alone = {name: value for name, value in changes.items() if name != "data_parallel_size_local"}
    supported.check_parallel(settings(**alone)[0], v0_32.VERSION, cpu=True)  # one has no siblings


def test_a_pipeline_that_vllm_itself_does_not_run_is_refused_by_name() -> None:
    with pytest.raises(ConfigError) as caught:
        supported.check(*settings(pipeline_parallel_size=2, compiled=False), v0_32.VERSION, cpu=True)
    reason = caught.value.reason()
    assert (reason.field, reason.ours) == ("pipeline-parallel-size", "2, not compiled")
    assert "--enforce-eager" in reason.remedy


@pytest.mark.parametrize(
    ("changes", "field", "ours"),
    [
        ({"data_parallel_size": 2}, "data-parallel-size", "2"),
        ({"distributed_executor_backend": "external_launcher"}, "distributed-executor-backend", "external_launcher"),
        ({"pipeline_parallel_size": 2}, "pipeline-parallel-size", "2"),
    ],
)
def test_several_hosts_that_were_not_tried_are_refused_by_name(changes: dict[str, Any], field: str, ours: str) -> None:
    with pytest.raises(ConfigError) as caught:
        supported.check_parallel(settings(nnodes=2, **changes)[0], v0_32.VERSION, cpu=True)
    reason = caught.value.reason()
    assert (reason.field, reason.ours) == (field, ours)
    assert reason.remedy


@pytest.mark.parametrize("version", [v0_27.VERSION, v0_29.VERSION])
def test_several_hosts_were_tried_with_one_version(version: Version) -> None:
    with pytest.raises(ConfigError, match="nnodes"):
        supported.check(*settings(nnodes=2), version, cpu=True)
