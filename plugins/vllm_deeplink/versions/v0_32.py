"""vLLM 0.32: sends, receives and failures are reported by request. The other versions say how they differ from this."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_deeplink.versions.expected import COMMON, CONNECTOR, CPU, Expected
from vllm_deeplink.versions.version import Version

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.request import Request

    from vllm_deeplink.worker import WorkerHalf

BASE = CONNECTOR.partition(":")[0]
CPU_BUILDER = {f"{CPU}:CPUAttentionMetadataBuilder": {"_set_isa_to_layers": ("layer_names",)}}
"""The layers of a group are told how to pack; before 0.29 each attention decided for itself."""


class Reports:
    """Where what it reports with is imported: only this version has it, and this module is read on all."""

    _worker: WorkerHalf | None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

        assert self._worker is not None
        settled = self._worker.results(finished_req_ids)
        return KVConnectorTransferResults(settled.sent, settled.received, set(settled.failed))

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        return {CacheHitSource.P2P: num_external_tokens} if num_external_tokens else {}


def packing(layer: Any) -> str:
    return str(getattr(layer, "isa", ""))


VERSION = Version(
    name="0.32.0",
    expected=COMMON
    | Expected(
        overridden={
            CONNECTOR: {
                "get_transfer_results": ("finished_req_ids",),
                "get_external_cache_hit_sources": ("request", "num_external_tokens"),
            }
        },
        called=CPU_BUILDER,
        read={
            f"{BASE}:KVConnectorTransferResults": ("finished_sending", "finished_recving", "failed_recving"),
            "v1/metrics/cache_hit_source.py:CacheHitSource": ("P2P",),
        },
    ),
    reports=Reports,
    packing=packing,
    several_groups=True,
    speculation=("ngram",),
    replicas=True,
    pipelines=True,
    nodes=True,
)
