"""One per scheduler process: its endpoint, its control endpoint, and how the loads of its requests have ended.

SGLang makes it with raw addresses of the cache; `attach` gives it the pool itself. All of it but what runs behind the
endpoint is called on the scheduler's thread, so a gather sees pages that nothing writes to, and nothing here waits.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import uuid
from dataclasses import dataclass
from typing import Any

from sglang.srt.disaggregation.base.conn import BaseKVBootstrapServer, BaseKVManager
from sglang.srt.runtime_context import get_disagg, get_serving

from deeplink import config, secret
from deeplink.errors import ConfigError
from deeplink.kvconnector import configured
from deeplink.kvconnector.contracts import contract as co
from deeplink.kvconnector.contracts.weights import OTHERS_LOADED
from deeplink.kvconnector.control import Blocks, Control
from deeplink.kvconnector.endpoint import Endpoint
from deeplink.kvconnector.handoffs.order import Order, Outcome
from deeplink.kvconnector.relayout import compiled
from deeplink.kvconnector.wires.tls import Tls
from deeplink.plugins import load_plugins
from sglang_deeplink import adapter, probe, rooms

log = logging.getLogger("sglang.deeplink")

PORT = "DEEPLINK_CONTROL_PORT"


@dataclass(frozen=True, slots=True)
class _Prefill:
    """What SGLang asks about a prefill engine before a request of a decode engine goes on."""

    dp_size: int = 1


class _AnyPrefill:
    """Of every address: where a prefill engine is, and which of its ranks has what, is in the ticket."""

    def get(self, address: str) -> _Prefill:
        return _Prefill()


_managers: list[DeepLinkKVManager] = []
"""Of this process: one, as SGLang makes it."""


def weights_changed() -> None:
    """Other weights are about to be loaded into this process."""
    for manager in _managers:
        manager.weights_changed()


class DeepLinkKVManager(BaseKVManager):
    # What SGLang's scheduler asks of a manager beyond its base class.
    is_dummy_cp_rank = False
    enable_all_cp_ranks_for_transfer = False

    def __init__(self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool = False) -> None:
        self.kv_args = args
        self.role: str = disaggregation_mode.value
        self.prefill_info_table = _AnyPrefill()
        self.epoch = uuid.uuid4().hex
        self._server_args = server_args
        self._config = config.load()
        self.secret = secret.load(self._config.secret_file)
        self.foreign_seconds = self._config.kv.foreign_seconds
        self._outcomes: dict[str, Outcome] = {}
        self._endpoint: Endpoint | None = None
        self._closed = False
        _managers.append(self)
        adapter.check_supported(server_args, self._config.kv, self.role)

    def register_to_bootstrap(self) -> None:
        """Nowhere: the contract is published at the control endpoint."""

    def attach(self, pool: Any, buffers: Any, scheduler: Any) -> None:
        """Read the layout from the live pool, prove it, and start to listen. `buffers` are where SGLang expects first
        tokens."""
        self.buffers = buffers
        plugins = load_plugins()
        log.info("deeplink re-layout is ready after %.1f s of compiling", compiled.warm())
        group = adapter.read_group(pool, scheduler.model_config.get_total_num_kv_heads(), plugins.layouts)
        self.page_size = group.spec.block_size
        probe.prove(pool, group.values)
        model = adapter.read_model(scheduler.model_config)
        settings = self._config.kv
        tls = Tls.of(settings.tls)
        self._endpoint = configured.endpoint(
            settings,
            tls,
            plugins,
            self.secret,
            self.epoch,
            (group,),
            lambda channel, transports, casts: adapter.make_contract(
                self.role, self.epoch, group, model, channel, transports, casts
            ),
        )

        if self.foreign_seconds and self.role == "prefill":
            self._endpoint.listen(rooms.listen(get_serving().host, get_disagg().disaggregation_bootstrap_port))
            log.warning("deeplink takes requests that other routers have paired, as kv.foreign_seconds says")

        def blocks() -> Blocks:
            allocator, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
            free = allocator.available_size() + tree.evictable_size()
            return Blocks(pool.size // self.page_size, math.ceil((pool.size - free) / self.page_size))

        self._control = Control(co.merged([self._endpoint.contract]), self.secret, blocks, tls)
        port = self._control.start(settings.host, _control_port())
        log.info("deeplink control endpoint on %s:%d", settings.host, port)
        atexit.register(self._close)

    @property
    def endpoint(self) -> Endpoint:
        if self._endpoint is None:
            raise ConfigError(
                "SGLang made deeplink's transfer backend without its cache; the hooks into it do not hold",
                remedy="install a version of SGLang that this plugin was tested with",
            )
        return self._endpoint

    def load(self, order: Order) -> None:
        self.endpoint.consumer.load(order)

    def outcome(self, handoff: str) -> Outcome | None:
        """How a load has ended, once; None as long as it has not."""
        for outcome in self.endpoint.consumer.collect():
            self._outcomes[outcome.order.ticket.handoff] = outcome
        return self._outcomes.pop(handoff, None)

    def forget(self, handoff: str) -> None:
        """Nobody will ask how this load has ended."""
        self.outcome(handoff)

    def weights_changed(self) -> None:
        """The contract says which weights the cache is of, and the caches of others would be taken for these."""
        if self._endpoint is not None and not self._closed:
            log.error("%s", OTHERS_LOADED)
            self._close()

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._control.close()
            self.endpoint.close()


class DeepLinkKVBootstrapServer(BaseKVBootstrapServer):
    """SGLang starts one beside a prefill engine's HTTP server. There is nothing for it to do: a decode engine learns
    from the ticket where to go, and from the channel what it finds there."""

    def __init__(self, host: str, port: int) -> None:
        pass


def _control_port() -> int:
    text = os.environ.get(PORT, "")
    return config.parse_port(text, PORT) if text else config.control_port(get_serving().port)
