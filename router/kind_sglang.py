"""SGLang's way to hand over: both engines are asked at once, and find each other by a room at the bootstrap server.

The prefill engine waits for the decode engine as that does for the cache, so if one fails the other's call is cut,
which makes it give up its room. An answer of the decode engine counts only once prefill has ended well: a prefill that
is given up may leave it with half a cache. Engines that were started to prefill or decode cannot serve alone.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from deeplink import hookimpl
from deeplink.errors import DeeplinkError, ProtocolError
from deeplink.router import body as bodies
from deeplink.router import said
from deeplink.router.body import Body
from deeplink.router.choice import Pair
from deeplink.router.engine import Engine, Said
from deeplink.router.exchange import Exchange
from deeplink.router.kind_vllm import host
from deeplink.router.kinds import Kind, Part, Prefilling, Probe, Tools

SGLANG = "sglang"
PORT = 8998
MAX_INFO = 4 << 20
COMPARED = ("model_path", "dtype", "kv_cache_dtype", "page_size", "quantization")
"""Of /server_info. SGLang itself compares none of them; a page size that differs ends the decode engine."""


@hookimpl
def deeplink_register_kinds(register: Callable[[str, Kind], None]) -> None:
    register(SGLANG, Sglang())


@dataclass(frozen=True, slots=True)
class Sglang:
    async def look(self, engine: Engine, probe: Probe) -> Said:
        await self.up(engine, probe)
        url = f"{engine.url}/server_info"
        info = said.document(url, *await probe.get(url, MAX_INFO), MAX_INFO)
        if not isinstance(info, dict):
            raise ProtocolError(f"{url} did not answer with a JSON object", field="body")
        mode = info.get("disaggregation_mode")
        role = mode if mode in ("prefill", "decode") else ""
        # What one of the two leaves to its defaults is none the less the same.
        settings = {name: said.text(info.get(name)) or "default" for name in COMPARED}
        port = said.text(info.get("disaggregation_bootstrap_port"))
        return Said(
            role=role or "alone",
            alone=not role,
            settings={**settings, "chip": ""},
            facts={"bootstrap_port": port if port.isdigit() else str(PORT)},
        )

    async def up(self, engine: Engine, probe: Probe) -> None:
        await probe.alive(engine.url)

    async def link(self, producer: Engine, consumer: Engine, probe: Probe) -> None:
        """The engines find each other."""

    def obstacle(self, body: Body, *, chat: bool) -> str:
        # Several answers to one prompt would need rooms in an order that the API does not promise.
        return "n" if body.fields.get("n") not in (None, 1) else ""

    def hand(self, exchange: Exchange, pair: Pair, until: float, tools: Tools) -> SglangHanding:
        return SglangHanding(exchange, pair)


@dataclass
class SglangHanding:
    exchange: Exchange
    pair: Pair
    together: bool | None = True
    confirmed: bool = True
    linger: bool = False
    _members: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        producer = self.pair.prefill
        name, port = host(producer).strip("[]"), PORT
        if producer.bootstrap:
            name, _, given = producer.bootstrap.rpartition(":")
            name, port = name.strip("[]"), int(given)
        elif producer.said is not None:
            port = int(producer.said.facts.get("bootstrap_port", PORT))
        prompt = self.exchange.body.fields.get("prompt")
        several = isinstance(prompt, list) and not all(isinstance(item, int) for item in prompt)
        count = len(prompt) if several and isinstance(prompt, list) else 0
        rooms = [secrets.randbits(63) for _ in range(count or 1)]
        self._members = {
            "bootstrap_host": [name] * count if count else name,
            "bootstrap_port": [port] * count if count else port,
            "bootstrap_room": rooms if count else rooms[0],
        }
        if producer.rank is not None:
            self._members["disagg_prefill_dp_rank"] = producer.rank

    async def ready(self, consumer: Engine) -> None:
        """The engines find each other."""

    def prefill(self) -> Part:
        return Part(bodies.unstreamed(self.exchange.body, self._members), [])

    def staged(self, answer: bytes) -> None:
        """That it has answered says that the decode engine has the cache."""

    def decode(self, consumer: Engine) -> Part:
        return Part(bodies.decode(self.exchange.body, self._members), [])

    async def offers(self, error: DeeplinkError) -> bool:
        return False

    def over(self, prefilling: Prefilling, finished: bool) -> None:
        prefilling.cancel()
