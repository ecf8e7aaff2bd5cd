"""The half in the process that holds the cache: it carries out the orders and reports what has ended.

Everything here runs on the engine's own thread except what `Endpoint` does behind it, so a gather sees blocks that
nothing writes to, and nothing here waits.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from deeplink.config import Config
from deeplink.errors import ConfigError, TicketRefused
from deeplink.kvconnector import compiled
from deeplink.kvconnector import contract as co
from deeplink.kvconnector.cast import parse_consent
from deeplink.kvconnector.endpoint import Endpoint, Settings
from deeplink.kvconnector.transport.start import start
from deeplink.plugins import load_plugins
from vllm_deeplink import adapter, probe
from vllm_deeplink.orders import Orders

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
        # Request -> its handoff, or None when the handoff could not be opened and there is nothing to wait for.
        self._producing: dict[str, str | None] = {}
        self._leaving: dict[str, str | None] = {}
        self._denied: set[str] = set()

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
            probe.prove(self._vllm_config, group.values, named_tensors)
        model = adapter.read_model(self._vllm_config)
        settings = self._config.kv
        casts = tuple(str(parse_consent(text)) for text in settings.casts)
        verify, tls = settings.digest == "always", adapter.load_tls(settings)
        transfer = self._vllm_config.kv_transfer_config
        self._endpoint = Endpoint(
            groups,
            Settings(settings.host, settings.staging, settings.chunk, verify, tls),
            self._secret,
            transfer.engine_id,
            start(
                plugins.transports.items,
                settings.host,
                self._secret,
                settings.trust,
                verify,
                {"tcp": {"tls": tls, "streams": settings.streams}},
            ),
            lambda channel, transports: adapter.make_contract(
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
            self._denied.add(deny.request)
        for order in orders.cancels:
            endpoint.consumer.cancel(order.ticket.handoff, order.request)

    def save(self, orders: Orders) -> None:
        """After the forward pass: stage what this step has computed."""
        producer = self._running.producer
        for handoff in orders.lost:
            producer.lose(handoff)
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

    def results(self, finished: set[str]) -> KVConnectorTransferResults:
        """What has ended since the last step. `finished` are requests that are over; each comes here once."""
        for name in finished & self._producing.keys():
            self._leaving[name] = self._producing.pop(name)
        settled = self._running.producer.settled
        sent = {name for name, handoff in self._leaving.items() if handoff is None or settled(handoff)}
        for name in sent:
            del self._leaving[name]
        received, self._denied = self._denied, set()
        failed = set(received)
        for outcome in self._running.consumer.collect():
            name, reason = outcome.order.request, outcome.reason
            if reason is not None:
                handoff = outcome.order.ticket.handoff
                log.warning("deeplink handoff %s failed: %s (%s)", handoff, reason.message, reason.code)
            if name:  # a load that only let the producer go has nobody waiting
                received.add(name)
                if reason is not None:
                    failed.add(name)
        return KVConnectorTransferResults(sent, received, failed)

    def close(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()
