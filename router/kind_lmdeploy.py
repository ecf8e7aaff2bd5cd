"""LMDeploy's way to hand over: its PD migration, spoken by the router itself.

Two engines are connected once, by the router, before their first handoff: who connects them again breaks what is being
read. Then prefill runs first and is asked to keep
its cache; its answer names the blocks and the last token, and the decode engine, told these, reads them and tells the
prefill engine to free them. What no decode engine will read is freed by a call to the prefill engine.

A number of blocks that a decode engine does not expect ends that engine for good, so it is compared before anything is
sent. The element type of a packed cache is not compared by LMDeploy: operators declare `dtype` and `chip`.
"""

from __future__ import annotations

import asyncio
import json
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
from deeplink.router.kinds import LINGER, Kind, Part, Prefilling, Probe, Tools, not_seen, settled

LMDEPLOY = "lmdeploy"
PROTOCOLS = {"tcp": 1, "rdma": 2, "nvlink": 3}
"""By the setting `protocol`; the numbers are LMDeploy's."""
SHARED = ("tp_size", "ep_size", "dp_size", "pp_size", "block_size")
MAX_LINK = 1 << 20
LINK_SECONDS = 30.0
OPAQUE = 1 << 47
"""From here on a number is no block's: deeplink's own migration backend names a whole cache by one of these."""
BACKEND, OURS = "migration_backend", "deeplink"
"""What LMDeploy's engines with deeplink in them add to their configuration."""
_SUCCESS = (0, 1, "SUCCESS")
"""How releases have written that a connection came about; failing is 2."""


@hookimpl
def deeplink_register_kinds(register: Callable[[str, Kind], None]) -> None:
    register(LMDEPLOY, Lmdeploy())


@dataclass
class Lmdeploy:
    """Keeps which engines were connected, by their incarnations."""

    links: dict[tuple[str, int, str, int], asyncio.Task[None]] = field(default_factory=dict)

    async def look(self, engine: Engine, probe: Probe) -> Said:
        await self.up(engine, probe)
        url = f"{engine.url}/distserve/engine_info"
        info = said.document(url, *await probe.get(url), 64 << 10)
        if isinstance(info, str):  # releases differ in whether the answer is JSON or JSON in a string
            info = said.document(url, 200, info.encode(), 64 << 10)
        if not isinstance(info, dict):
            raise ProtocolError(f"{url} did not answer with an engine's configuration", field="body")
        models_url = f"{engine.url}/v1/models"
        models = said.document(models_url, *await probe.get(models_url), 64 << 10)
        data = models.get("data") if isinstance(models, dict) else None
        first = data[0] if isinstance(data, list) and data and isinstance(data[0], dict) else {}
        settings = {name: said.text(info.get(name)) for name in SHARED if name in info}
        settings |= {"model": said.text(first.get("id")), "dtype": "", "chip": "", "protocol": "rdma"}
        if info.get(BACKEND) == OURS:
            # The engines compare contracts when they are connected, and convert between block sizes.
            settings |= dict.fromkeys(("block_size", "dtype", "chip"), "by contract") | {BACKEND: OURS}
        return Said(alone=engine.role == "both", settings=settings, facts={"config": json.dumps(info)})

    async def up(self, engine: Engine, probe: Probe) -> None:
        await probe.alive(engine.url)

    def obstacle(self, body: Body, *, chat: bool) -> str:
        return bodies.obstacle(body, chat=chat)

    def hand(self, exchange: Exchange, pair: Pair, until: float, tools: Tools) -> LmdeployHanding:
        return LmdeployHanding(exchange, pair, tools)

    async def link(self, producer: Engine, consumer: Engine, probe: Probe) -> None:
        """Once for each two; who comes meanwhile waits for the same. Raises DeeplinkError; then the next tries anew."""
        assert producer.said is not None
        assert consumer.said is not None
        key = (producer.url, producer.said.incarnation, consumer.url, consumer.said.incarnation)
        task = self.links.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            for old in [old for old in self.links if (old[0], old[2]) == (key[0], key[2])]:
                del self.links[old]
            task = self.links[key] = asyncio.create_task(_connect(producer, consumer, probe))
            task.add_done_callback(lambda task: None if task.cancelled() else task.exception() and None)
        await asyncio.shield(task)


async def _connect(producer: Engine, consumer: Engine, probe: Probe) -> None:
    """Both make their end, then each is told the other's."""
    protocol = _protocol(producer)

    async def call(engine: Engine, path: str, given: dict[str, Any]) -> dict[str, Any]:
        url = f"{engine.url}/distserve/{path}"
        body = json.dumps(given).encode()
        answer = said.document(url, *await probe.post(url, body, MAX_LINK, LINK_SECONDS), MAX_LINK)
        if not isinstance(answer, dict) or answer.get("status") not in _SUCCESS:
            raise ProtocolError(f"{url} did not connect {producer.name} and {consumer.name}", field="status")
        return answer

    ends: dict[str, dict[str, Any]] = {}
    for engine, other in ((producer, consumer), (consumer, producer)):
        ends[engine.name] = await call(
            engine,
            "p2p_initialize",
            {
                "protocol": protocol,
                "local_engine_id": engine.url,
                "local_engine_config": _config(engine),
                "remote_engine_id": other.url,
                "remote_engine_config": _config(other),
            },
        )
    for engine, other in ((producer, consumer), (consumer, producer)):
        end = ends[other.name]
        await call(
            engine,
            "p2p_connect",
            {
                "protocol": protocol,
                "remote_engine_id": other.url,
                "remote_engine_endpoint_info": end.get("engine_endpoint_info"),
                "remote_kvtransfer_endpoint_info": end.get("kvtransfer_endpoint_info"),
            },
        )


def _config(engine: Engine) -> dict[str, Any]:
    assert engine.said is not None
    config: dict[str, Any] = json.loads(engine.said.facts["config"])
    return config


def _protocol(engine: Engine) -> int:
    name = engine.settings.get("protocol", "rdma")
    if name not in PROTOCOLS:
        raise ProtocolError(
            f"engine {engine.name}: no such protocol", field="settings.protocol", ours=", ".join(PROTOCOLS), theirs=name
        )
    return PROTOCOLS[name]


@dataclass
class LmdeployHanding:
    exchange: Exchange
    pair: Pair
    tools: Tools
    together: bool | None = False
    confirmed: bool = False
    linger: bool = True

    def __post_init__(self) -> None:
        self._migration: dict[str, Any] = {}
        self._seen = False

    async def ready(self, consumer: Engine) -> None:
        await self.tools.fleet.link(self.pair.prefill, consumer)

    def prefill(self) -> Part:
        members = {"with_cache": True, "preserve_cache": True}
        return Part(bodies.prefill(self.exchange.body, members, chat=self.exchange.chat), [])

    def staged(self, answer: bytes) -> None:
        engine = self.pair.prefill
        value = said.document(f"engine {engine.name}", 200, answer, len(answer))
        if not isinstance(value, dict):
            value = {}
        session = _session(value)
        blocks, tokens = _numbers(value.get("cache_block_ids")), _numbers(value.get("remote_token_ids"))
        if session is None or not blocks or not tokens:
            missing = "session" if session is None else "cache_block_ids" if not blocks else "remote_token_ids"
            raise PrefillFailed(
                f"engine {engine.name} prefilled but did not say where the KV cache is",
                field=missing,
                remedy="its release answers without the session's id; see docs/router.md for those that do",
            )
        self._migration = {
            "protocol": _protocol(engine),
            "remote_engine_id": engine.url,
            "remote_session_id": session,
            "remote_token_id": tokens[-1],
            "remote_block_ids": blocks,
            "is_dummy_prefill": False,
        }
        usage = value.get("usage")
        prompt = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        if len(blocks) == 1 and blocks[0] >= OPAQUE:
            return
        size = _config(engine).get("block_size")
        if isinstance(prompt, int) and isinstance(size, int) and size > 0 and len(blocks) != -(-prompt // size):
            raise PrefillFailed(
                f"engine {engine.name} names {len(blocks)} blocks for {prompt} tokens",
                field="cache_block_ids",
                ours=f"{-(-prompt // size)} of {size} tokens",
                theirs=str(len(blocks)),
            )

    def decode(self, consumer: Engine) -> Part:
        self._seen = True
        return Part(bodies.decode(self.exchange.body, {"migration_request": self._migration}), [])

    async def offers(self, error: DeeplinkError) -> bool:
        if not_seen(error):
            self._seen = False
        return not self._seen

    def over(self, prefilling: Prefilling, finished: bool) -> None:
        if not finished:
            self.tools.fleet.later(self._leave(prefilling))

    async def _leave(self, prefilling: Prefilling) -> None:
        await settled(prefilling)
        if not self._migration:
            return
        if self._seen:
            # It may be reading still; past this its call has been cut.
            await asyncio.sleep(LINGER)
        given = {
            "remote_engine_id": self._migration["remote_engine_id"],
            "remote_session_id": self._migration["remote_session_id"],
        }
        try:
            await self.tools.probe.post(f"{self.pair.prefill.url}/distserve/free_cache", json.dumps(given).encode())
        except DeeplinkError:
            return  # it is gone, and its cache with it


def _session(value: dict[str, Any]) -> int | None:
    """The scheduler's id, by which blocks are read and freed. Ids of answers are that only where they are numbers."""
    for name in ("cache_session_id", "id"):
        found = value.get(name)
        if isinstance(found, str) and found.isdigit():
            found = int(found)
        if isinstance(found, int) and not isinstance(found, bool) and found >= 0:
            return found
    return None


def _numbers(value: Any) -> list[int]:
    """A list of numbers, or the first of several such lists, one for each prompt."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        value = value[0]
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        return []
    return value
