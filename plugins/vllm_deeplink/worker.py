"""The half in the process that holds the cache: it carries out the orders and reports what has ended.

Everything here runs on the engine's own thread except what `Endpoint` does behind it, so a gather sees blocks that
nothing writes to, and nothing here waits.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from deeplink.config import Config
from deeplink.errors import ConfigError, TicketRefused
from deeplink.kvconnector import configured
from deeplink.kvconnector.contracts import contract as co
from deeplink.kvconnector.endpoint import Endpoint
from deeplink.kvconnector.handoffs.tally import Tally, since
from deeplink.kvconnector.relayout import compiled
from deeplink.kvconnector.wires.tls import Tls
from deeplink.plugins import load_plugins
from vllm_deeplink import adapter, probe
from vllm_deeplink.orders import Orders, Settled
from vllm_deeplink.stats import DeepLinkStats

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = logging.getLogger("vllm.deeplink")


class WorkerHalf:
    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: Config, secret: bytes) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = config
        self._secret = secret
        self._endpoint: Endpoint | None = None
        self._tallies: tuple[Tally, ...] = ()
        # Request -> its handoff, or None when the handoff could not be opened and there is nothing to wait for.
        self._producing: dict[str, str | None] = {}
        self._leaving: dict[str, str | None] = {}
        self._denied: dict[str, int] = {}

    @property
    def contract(self) -> bytes:
        return co.encode(self._running.contract)

    @property
    def _running(self) -> Endpoint:
        if self._endpoint is None:
            raise ConfigError("the KV cache has not been registered yet")
        return self._endpoint

    def register(self, tensors: dict[str, torch.Tensor]) -> None:
        """Read the layout from the live tensors, prove it, and start to listen."""
        plugins = load_plugins()
        log.info("deeplink re-layout is ready after %.1f s of compiling", compiled.warm())
        place = adapter.read_place()
        groups = adapter.read_groups(self._vllm_config, self._kv_cache_config, tensors, plugins.layouts, place)
        for group, named in zip(groups, self._kv_cache_config.kv_cache_groups, strict=True):
            named_tensors = {name: tensors[name] for name in adapter.layer_names(named)}
            probe.prove(self._vllm_config, group.values, named_tensors, group.spec.dtype)
        if elsewhere := sorted({str(tensor.device) for tensor in tensors.values()} - {"cpu"}):
            log.warning(
                "deeplink hands over a cache on %s: its layout has just been proven there, but no engine with a cache "
                "on a device has been tested yet",
                ", ".join(elsewhere),
            )
        model = adapter.read_model(self._vllm_config)
        settings = self._config.kv
        self._endpoint = configured.endpoint(
            settings,
            Tls.of(settings.tls),
            plugins,
            self._secret,
            self._vllm_config.kv_transfer_config.engine_id,
            groups,
            lambda channel, transports, casts: adapter.make_contract(
                self._vllm_config, groups, place, model, channel, transports, casts
            ),
            place.index,
        )

    def start(self, orders: Orders) -> None:
        """Start what loads, stop what is no longer wanted. Does not wait."""
        endpoint = self._running
        for handoff, first in orders.firsts:
            endpoint.producer.conclude(handoff, first)
        for order in orders.loads:
            endpoint.consumer.load(order)
        for deny in orders.denies:
            if deny.handoff is not None:
                endpoint.refuse(deny.handoff, deny.reason)
            self._denied[deny.request] = self._block(deny.start, deny.tables)
        for order in orders.cancels:
            endpoint.consumer.cancel(order.ticket.handoff, order.request)

    def save(self, orders: Orders) -> None:
        """After the forward pass: stage what this step has computed. A second call for the same step does nothing."""
        if orders.saved:
            return
        orders.saved = True
        producer = self._running.producer
        for handoff in orders.lost:
            producer.lose(handoff)
        for one in orders.withheld:
            self._running.withhold(one.handoff, one.reason)
        for open_ in orders.opens:
            try:
                producer.open(open_.ticket, open_.prompt, open_.tokens)
                self._producing[open_.request] = open_.ticket.handoff
            except TicketRefused as exc:
                # The prefill itself is in order; whoever comes to claim with this ticket is told the same.
                log.warning("deeplink handoff %s is not offered: %s", open_.ticket.handoff, exc)
                self._producing[open_.request] = None
        for fill in orders.fills:
            if self._producing.get(fill.request) == fill.handoff:
                producer.fill(fill.handoff, fill.tables, fill.computed)
        for handoff in orders.aborts:
            producer.abort(handoff)
        producer.pump()

    def results(self, finished: set[str]) -> Settled:
        """What has ended since the last step. `finished` are requests that are over; each comes here once."""
        for name in finished & self._producing.keys():
            self._leaving[name] = self._producing.pop(name)
        settled = self._running.producer.settled
        sent = {name for name, handoff in self._leaving.items() if handoff is None or settled(handoff)}
        for name in sent:
            del self._leaving[name]
        failed, self._denied = self._denied, {}
        received = set(failed)
        for outcome in self._running.consumer.collect():
            order, reason = outcome.order, outcome.reason
            if reason is not None:
                log.warning("deeplink handoff %s failed: %s (%s)", order.ticket.handoff, reason.message, reason.code)
            if order.request:  # a load that only let the producer go has nobody waiting
                received.add(order.request)
                if reason is not None:
                    failed[order.request] = self._block(order.start, order.tables)
        return Settled(sent, received, failed)

    def _block(self, start: int, tables: Sequence[Sequence[int]]) -> int:
        """The first block, in the first cache group, into which the tokens from `start` on are loaded."""
        size: int = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        return tables[0][start // size]

    def stats(self) -> DeepLinkStats | None:
        """What has ended since the last step, if anything has."""
        if self._endpoint is None:
            return None
        now = self._endpoint.tallies()
        ended, self._tallies = since(self._tallies, now), now
        return DeepLinkStats.of(ended) if ended else None

    def close(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()
