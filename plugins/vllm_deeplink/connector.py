"""vLLM's connector, in two halves: vLLM makes one per process and says which half it is to be.

| vLLM calls                             | process     | goes to             |
|----------------------------------------|-------------|---------------------|
| get_num_new_matched_tokens             | engine core | SchedulerHalf.match |
| update_state_after_alloc               | engine core | .allocated          |
| build_connector_meta                   | engine core | .step               |
| request_finished(_all_groups)          | engine core | .finished           |
| bind_gpu_block_pool                    | engine core | the control endpoint|
| set_xfer_handshake_metadata_pp_aware   | engine core | the control endpoint|
| register_kv_caches                     | worker      | WorkerHalf.register |
| start_load_kv                          | worker      | .start              |
| wait_for_save                          | worker      | .save               |
| get_transfer_results, or before 0.30   | worker      | .results            |
|   get_finished                         |             |                     |
| get_kv_connector_stats                 | both        | .stats              |
| build_prom_metrics                     | API server  | stats               |

The row of the results is what the versions of vLLM have of their own: see `versions`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.platforms import current_platform

from deeplink import config, secret
from deeplink.errors import Refused
from deeplink.kvconnector.contracts import contract as co
from deeplink.kvconnector.control import Blocks, Control
from deeplink.kvconnector.handoffs.watching import Watching
from deeplink.kvconnector.registration import Presence, Registration
from deeplink.kvconnector.wires.tls import Tls
from vllm_deeplink import adapter, changes, supported, termination, versions
from vllm_deeplink.early import EarlyClaims
from vllm_deeplink.orders import Orders, RankContract
from vllm_deeplink.stats import DeepLinkPromMetrics, DeepLinkStats

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from vllm_deeplink.scheduler import SchedulerHalf
    from vllm_deeplink.worker import WorkerHalf

log = logging.getLogger("vllm.deeplink")

VERSION = versions.current()
"""Here, so that a vLLM whose interface differs is refused before it meets the class below."""

Reports: Any = VERSION.reports


class DeepLinkConnector(Reports, KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        supported.check(vllm_config, kv_cache_config, VERSION, cpu=current_platform.is_cpu())
        VERSION.check_groups(len(kv_cache_config.kv_cache_groups))
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._settings = config.load(extra.get("config"))
        self._secret = secret.load(self._settings.secret_file)
        self._control_port = int(extra.get("control_port", 0))
        self._register: dict[str, str] | None = extra.get("registration")
        replicas = int(extra.get("replicas", 1))
        self._replica = adapter.replica(vllm_config) if replicas > 1 else None
        self._control: Control | None = None
        self._registration: Registration | None = None
        self._watching: Watching | None = None
        self._pool: BlockPool | None = None
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role == KVConnectorRole.SCHEDULER:
            from vllm_deeplink.scheduler import SchedulerHalf

            self._watching = Watching(self._secret, Tls.of(self._settings.kv.tls))
            early = EarlyClaims(
                self._watching,
                lambda: self._blocks().total,
                [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups],
                vllm_config.model_config.max_model_len,
            )
            self._scheduler = SchedulerHalf(self._secret, vllm_config.kv_transfer_config.engine_id, early)
            changes.watch(self._weights_changed)
        else:
            from vllm_deeplink.worker import WorkerHalf

            self._worker = WorkerHalf(vllm_config, kv_cache_config, self._settings, self._secret)

    # -- engine core -----------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._pool = gpu_block_pool

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """All workers, by their places in the pipeline and the tensor-parallel group, have registered their cache:
        publish one contract for the engine."""
        contracts = [co.decode(rank.contract) for _, rank in sorted(metadata.items()) if isinstance(rank, RankContract)]
        contract, host = co.merged(contracts), self._settings.kv.host
        self._control = Control(contract, self._secret, self._blocks, Tls.of(self._settings.kv.tls), early=True)
        wanted = config.replica_port(self._control_port, self._replica) if self._control_port else 0
        port = self._control.start(host, wanted)
        log.info("deeplink control endpoint on %s:%d", host, port)
        if (where := self._register) is not None:
            control = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            presence = Presence(where["name"], where["url"], control, contract.epoch, rank=self._replica)
            self._registration = Registration(where["router"], presence, self._secret, log, where["api"])
            self._registration.start()
            termination.also(self._registration.end_soon)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        return self._scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        assert self._scheduler is not None
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        assert self._scheduler is not None
        return self._scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        assert self._scheduler is not None
        self._scheduler.reported(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        return self._scheduler.finished(request), None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        return self._scheduler.finished(request), None

    def _weights_changed(self, method: str) -> None:
        """A method of the workers' is about to be called that may load other weights, and the contract says which ones
        the cache is of."""
        assert self._scheduler is not None
        changes.forget(self._weights_changed)
        why = Refused(
            "the engine's weights may be others than those that it was started with",
            field="model.weights",
            ours=f"after a call of {method}",
            remedy="start the engine again with the weights that it is to serve",
        )
        log.error("deeplink hands nothing over any more: %s", why)
        self._scheduler.withdraw(why)
        if self._registration is not None:
            self._registration.end_soon()
        if self._control is not None:
            self._control.close()

    # -- metrics ---------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> DeepLinkStats | None:
        half = self._scheduler or self._worker
        assert half is not None
        return half.stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> DeepLinkStats:
        return DeepLinkStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> DeepLinkPromMetrics:
        return DeepLinkPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _blocks(self) -> Blocks:
        pool = self._pool
        assert pool is not None
        total = pool.num_gpu_blocks - 1  # block 0 is vLLM's null block, never given to a request
        return Blocks(total, total - pool.get_num_free_blocks())

    # -- worker ----------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self._worker is not None
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        assert self._worker is not None
        return RankContract(self._worker.contract)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        assert self._worker is not None
        self._worker.start(self._orders())

    def wait_for_save(self) -> None:
        assert self._worker is not None
        self._worker.save(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request runs only after its whole load was reported."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Nothing to save per layer: a chunk is staged whole, after the forward pass."""

    def shutdown(self) -> None:
        changes.forget(self._weights_changed)
        if self._registration is not None:
            self._registration.close()
        if self._watching is not None:
            self._watching.close()
        if self._worker is not None:
            self._worker.close()
        if self._control is not None:
            self._control.close()

    def _orders(self) -> Orders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        return orders
