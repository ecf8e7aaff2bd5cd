"""vLLM's own ways to hand over: its NIXL connector and its Mooncake connector.

Both prefill first, with one token asked for. NIXL's answer says where the cache is, and the decode engine is told that
verbatim. With Mooncake the router makes up an id, and the decode engine looks the prefill engine up at its bootstrap
address. A prefill engine keeps the cache until a decode engine has read it, or its own time limit is over; there is no
call that ends it. A decode engine that has seen the request ends it in any case, by reading or by giving up. So a cache
that was prefilled in vain is read once more: by one request for one token. It is never read twice: what is read the
second time may be another's already, and would stay in the decode engine's prefix cache.

Neither connector compares everything that has to be equal, such as the order of the bytes on the chip: operators
declare `chip`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from deeplink import hookimpl
from deeplink.errors import DeeplinkError, PrefillFailed, ProtocolError
from deeplink.router import body as bodies
from deeplink.router import said
from deeplink.router.body import Body
from deeplink.router.choice import Pair
from deeplink.router.engine import Engine, Said
from deeplink.router.exchange import Exchange
from deeplink.router.kinds import Kind, Part, Prefilling, Probe, Tools, not_seen, rank_header, settled
from deeplink.router.upstream import Lost, NotSent

NIXL, MOONCAKE = "vllm-nixl", "vllm-mooncake"
DECLARED = "chip"
MAX_METRICS = 4 << 20
SPEND_SECONDS = 30.0

log = logging.getLogger(__name__)


@hookimpl
def deeplink_register_kinds(register: Callable[[str, Kind], None]) -> None:
    register(NIXL, Vllm(mooncake=False))
    register(MOONCAKE, Vllm(mooncake=True))


@dataclass(frozen=True, slots=True)
class Vllm:
    mooncake: bool

    async def look(self, engine: Engine, probe: Probe) -> Said:
        await self.up(engine, probe)
        facts = {"engine_id": await self._engine_id(engine, probe)} if self.mooncake and engine.produces else {}
        return Said(settings=await _settings(engine, probe), facts=facts)

    async def up(self, engine: Engine, probe: Probe) -> None:
        await probe.alive(engine.url)
        # It is another one after every start, and nothing else tells of a start that no look fell into.
        if not (self.mooncake and engine.produces) or engine.down or engine.said is None:
            return
        if await self._engine_id(engine, probe) != engine.said.facts.get("engine_id"):
            raise ProtocolError(f"engine {engine.name} was restarted", field="engine_id")

    async def link(self, producer: Engine, consumer: Engine, probe: Probe) -> None:
        """The engines find each other."""

    def obstacle(self, body: Body, *, chat: bool) -> str:
        return bodies.obstacle(body, chat=chat)

    def hand(self, exchange: Exchange, pair: Pair, until: float, tools: Tools) -> VllmHanding:
        return VllmHanding(exchange, pair, tools, secrets.token_hex(16) if self.mooncake else "")

    async def _engine_id(self, engine: Engine, probe: Probe) -> str:
        """Of the data-parallel rank that this engine is."""
        url = f"http://{bootstrap(engine)}/query"
        found = said.document(url, *await probe.get(url), 64 << 10)
        rank = found.get(str(engine.rank or 0)) if isinstance(found, dict) else None
        name = said.text(rank.get("engine_id")) if isinstance(rank, dict) else ""
        if not name:
            raise ProtocolError(f"{url} names no engine of rank {engine.rank or 0}", field="engine_id")
        return name


def bootstrap(engine: Engine) -> str:
    """host:port; without a setting the engine's host and the port that both vLLM and SGLang take."""
    return engine.bootstrap or f"{host(engine)}:8998"


def host(engine: Engine) -> str:
    """As in a URL: an IPv6 address is in brackets."""
    name = engine.url.partition("://")[2]
    return name.rpartition(":")[0] if ":" in name.rpartition("]")[2] else name


async def _settings(engine: Engine, probe: Probe) -> dict[str, str]:
    """What has to be equal, as far as the API tells."""
    models_url, version_url = f"{engine.url}/v1/models", f"{engine.url}/version"
    status, listing = await probe.get(models_url)
    # With a key of its own it does not tell us; then the operator has to.
    models = {} if status in (401, 403) else said.document(models_url, status, listing, 64 << 10)
    version = said.document(version_url, *await probe.get(version_url), 64 << 10)
    _, metrics = await probe.get(f"{engine.url}/metrics", MAX_METRICS)
    data = models.get("data") if isinstance(models, dict) else None
    first = data[0] if isinstance(data, list) and data and isinstance(data[0], dict) else {}
    return {
        "model": said.text(first.get("root") or first.get("id")),
        "version": said.text(version.get("version")) if isinstance(version, dict) else "",
        "block_size": said.label(metrics, "vllm:cache_config_info", "block_size"),
        "cache_dtype": said.label(metrics, "vllm:cache_config_info", "cache_dtype"),
        DECLARED: "",
    }


@dataclass
class VllmHanding:
    """`transfer` is the id that Mooncake goes by; without one it is NIXL's way."""

    exchange: Exchange
    pair: Pair
    tools: Tools
    transfer: str
    together: bool | None = field(init=False)
    confirmed: bool = False
    linger: bool = True

    def __post_init__(self) -> None:
        self.together = None if self.transfer else False
        self._params: dict[str, Any] = {}
        self._seen = False

    async def ready(self, consumer: Engine) -> None:
        """The engines find each other."""

    def prefill(self) -> Part:
        params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        if self.transfer:
            params["transfer_id"] = self.transfer
        else:
            params |= dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
        # Without a least number of tokens the first may be the last, and the engine would keep nothing.
        members = {bodies.PARAMS: params, "min_tokens": 1}
        return Part(bodies.prefill(self.exchange.body, members, chat=self.exchange.chat), [])

    def staged(self, answer: bytes) -> None:
        if self.transfer:
            return
        value = said.document(f"engine {self.pair.prefill.name}", 200, answer, len(answer))
        params = value.get(bodies.PARAMS) if isinstance(value, dict) else None
        if not isinstance(params, dict) or not params.get("do_remote_prefill"):
            raise PrefillFailed(
                f"engine {self.pair.prefill.name} prefilled but did not say where the KV cache is",
                field=bodies.PARAMS,
                theirs="null" if params is None else "without do_remote_prefill",
                remedy="start it with the NIXL connector as a producer",
            )
        self._params = params

    def decode(self, consumer: Engine) -> Part:
        self._seen = True
        return Part(bodies.decode(self.exchange.body, {bodies.PARAMS: self._fetch()}), [])

    async def offers(self, error: DeeplinkError) -> bool:
        if not_seen(error):
            self._seen = False
        return not self._seen

    def over(self, prefilling: Prefilling, finished: bool) -> None:
        if not finished:
            self.tools.fleet.later(self._leave(prefilling))

    def _fetch(self) -> dict[str, Any]:
        if not self.transfer:
            return self._params
        producer = self.pair.prefill
        return {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": self.transfer,
            "remote_engine_id": producer.said.facts.get("engine_id", "") if producer.said else "",
            "remote_bootstrap_addr": f"http://{bootstrap(producer)}",
        }

    async def _leave(self, prefilling: Prefilling) -> None:
        if not await settled(prefilling) or self._seen:
            return
        body = bodies.prefill(self.exchange.body, {bodies.PARAMS: self._fetch()}, chat=self.exchange.chat)
        ours = self.pair.prefill.name
        consumers = [pair.decode for pair in self.tools.fleet.table.pairs if pair.prefill.name == ours]
        for consumer in sorted(consumers, key=lambda engine: engine.name != self.pair.decode.name):
            try:
                await asyncio.wait_for(self._spend(consumer, body), SPEND_SECONDS)
            except NotSent as exc:
                log.debug("engine %s cannot read what %s keeps: %s", consumer.name, ours, exc)
            except (Lost, asyncio.TimeoutError) as exc:
                log.warning("engine %s may not have read what %s keeps: %s", consumer.name, ours, exc)
                return
            else:
                return
        log.warning("no decode engine reads what engine %s keeps; its own time limit will end that", ours)

    async def _spend(self, consumer: Engine, body: bytes) -> None:
        headers = [*self.exchange.headers, *rank_header(consumer)]
        reply = await self.tools.upstream.post(consumer.url + self.exchange.target, body, headers)
        try:
            await reply.read(MAX_METRICS)
        finally:
            reply.close()
