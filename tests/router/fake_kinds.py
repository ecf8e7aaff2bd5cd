"""Engines of other kinds, true to their protocols: what they keep, who may read it, and what ends it."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web

from .fake_engine import CHUNKS, Call, FakeEngine, answers, break_connection, cut_short, dies, make_contract, stream

Outcome = Literal["well", "400", "500", "503", "dies", "empty", "cut", "torn stream", "silent"]
KINDS = ("vllm-nixl", "vllm-mooncake", "sglang", "lmdeploy")
BLOCK = 16


@dataclass
class Cache:
    """What all prefill engines keep for others, by the name it goes by. `wrong` are events that would be wrong tokens,
    a dead engine, or a leak."""

    kept: dict[str, str] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    rooms: dict[int, dict[str, asyncio.Event]] = field(default_factory=dict)
    numbers: Any = field(default_factory=lambda: itertools.count(1))

    def keep(self, name: str, by: str) -> None:
        self.kept[name] = by

    def fetch(self, name: str, by: str) -> bool:
        """A decode engine reads, and the prefill engine frees."""
        if name in self.read:
            self.wrong.append(f"{by} read {name} a second time")
        self.read.add(name)
        return self.kept.pop(name, None) is not None

    def free(self, name: str) -> None:
        self.kept.pop(name, None)

    def room(self, number: int) -> dict[str, asyncio.Event]:
        return self.rooms.setdefault(number, {name: asyncio.Event() for name in ("prefill", "decode", "moved", "over")})


@dataclass
class Kin:
    """One engine of a kind other than ours. `outcomes` are what becomes of one request after the other, once `open`."""

    name: str
    kind: str
    cache: Cache
    outcomes: list[Outcome] = field(default_factory=lambda: ["well"])
    said: dict[str, str] = field(default_factory=dict)
    chip: str = "a"
    open: asyncio.Event = field(default_factory=asyncio.Event)
    linked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    engine: FakeEngine = field(init=False)

    def __post_init__(self) -> None:
        self.role = {"p": "prefill", "d": "decode", "b": "both"}[self.name[0]]
        settings = {"chip": self.chip} | ({"dtype": "bfloat16"} if self.kind == "lmdeploy" else {})
        self.engine = FakeEngine(self.name, make_contract("both"), kind=self.kind, check_epoch=False, model="m")
        self.engine.declared = {"settings": settings} | ({} if self.kind == "sglang" else {"role": self.role})
        self.engine.answer = self._answer
        self.engine.others = {
            "/version": {"version": self.said.get("version", "0.32.0")},
            "/metrics": self._metrics,
            "/query": {"0": {"engine_id": f"id of {self.name}", "worker_addr": {}}},
            "/server_info": self._server_info,
            "/distserve/engine_info": self._engine_info,
            "/distserve/p2p_initialize": self._initialize,
            "/distserve/p2p_connect": self._connect,
            "/distserve/free_cache": self._free,
        }

    def point_at_itself(self) -> None:
        """Its bootstrap server is where its API is."""
        if self.kind in ("vllm-mooncake", "sglang"):
            self.engine.declared["bootstrap"] = self.engine.url.partition("://")[2]

    @property
    def requests(self) -> list[Call]:
        """Those that generate."""
        return [call for call in self.engine.calls if call.path in ("/v1/completions", "/v1/chat/completions")]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        call = self.requests[-1]
        outcome = self.outcomes[min(len(self.requests), len(self.outcomes)) - 1]
        work = {"sglang": self._sglang, "lmdeploy": self._lmdeploy}.get(self.kind, self._vllm)
        return await work(call, outcome, lambda more: self._end(request, call, outcome, more))

    # What each does with a request; `end` makes the answer.

    async def _vllm(self, call: Call, outcome: Outcome, end: End) -> web.StreamResponse:
        params = call.body.get("kv_transfer_params") or {}
        mooncake = self.kind == "vllm-mooncake"
        if params.get("do_remote_decode"):
            assert call.body["max_tokens"] == call.body["min_tokens"] == 1
            assert not call.body["stream"]
            await self._gate(outcome)
            if outcome not in ("well", "torn stream"):
                return await end({})
            name = params["transfer_id"] if mooncake else f"{self.name}-{next(self.cache.numbers)}"
            if mooncake and name in self.cache.read:
                return await end({})
            self.cache.keep(name, self.name)
            told = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_block_ids": [[1, 2]],
                "remote_engine_id": f"id of {self.name}",
                "remote_request_id": name,
                "remote_host": "h",
                "remote_port": 1,
                "tp_size": 1,
            }
            return await end({"kv_transfer_params": None if mooncake else told})
        if not params.get("do_remote_prefill"):
            self.cache.wrong.append(f"{self.name} was to prefill by itself")
            return await end({})
        name = params["transfer_id"] if mooncake else params["remote_request_id"]
        if mooncake:
            assert params["remote_engine_id"].startswith("id of p")
            assert params["remote_bootstrap_addr"].startswith("http://127.0.0.1:")
        try:
            await self._gate(outcome)
            while mooncake and name not in self.cache.kept:
                await asyncio.sleep(0.01)
        finally:
            # Whatever becomes of the request: an engine that gives it up says so to the other.
            self.cache.fetch(name, self.name)
        return await end({})

    async def _sglang(self, call: Call, outcome: Outcome, end: End) -> web.StreamResponse:
        body = call.body
        room = body["bootstrap_room"]
        assert type(body["bootstrap_port"]) is int
        assert body["bootstrap_host"] == "127.0.0.1"
        events = self.cache.room(room)
        mine = "prefill" if self.role == "prefill" else "decode"
        assert not events[mine].is_set(), "a room was used twice"
        events[mine].set()
        name = f"room {room}"
        if mine == "prefill":
            self.cache.keep(name, self.name)
        try:
            await self._gate(outcome)
            if outcome in ("well", "torn stream", "dies", "cut"):
                if mine == "prefill":
                    await events["decode"].wait()
                    events["moved"].set()
                else:
                    await events["moved"].wait()
            return await end({})
        finally:
            if mine == "prefill":
                self.cache.free(name)

    async def _lmdeploy(self, call: Call, outcome: Outcome, end: End) -> web.StreamResponse:
        body = call.body
        if self.role == "prefill":
            assert body["with_cache"] is True
            assert body["preserve_cache"] is True
            assert body["max_tokens"] == 1
            await self._gate(outcome)
            if outcome not in ("well", "torn stream"):
                return await end({})
            session = next(self.cache.numbers)
            self.cache.keep(f"{self.engine.url} {session}", self.name)
            return await end(
                {
                    "id": str(session),
                    "cache_block_ids": [[7, 8]],
                    "remote_token_ids": [[3, 9]],
                    "usage": {"prompt_tokens": 2 * BLOCK - 1},
                }
            )
        told = body["migration_request"]
        assert told["remote_block_ids"] == [7, 8]
        assert told["remote_token_id"] == 9
        assert told["remote_engine_id"] in {peer for peer, _ in self.linked}, "not connected"
        await self._gate(outcome)
        name = f"{told['remote_engine_id']} {told['remote_session_id']}"
        if outcome in ("well", "torn stream") and not self.cache.fetch(name, self.name):
            self.cache.wrong.append(f"{self.name} read {name}, which was freed")
        return await end({})

    async def _gate(self, outcome: Outcome) -> None:
        await self.open.wait()
        if outcome == "silent":
            await asyncio.sleep(60)

    async def _end(
        self, request: web.Request, call: Call, outcome: Outcome, more: dict[str, Any]
    ) -> web.StreamResponse:
        streamed = bool(call.body.get("stream"))
        if outcome in ("well", "torn stream"):
            if streamed:
                torn = outcome == "torn stream"
                return await stream(request, CHUNKS[:1] if torn else CHUNKS, die=torn)
            return web.json_response({"choices": [{"text": "hello"}]} | more)
        made: dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]] = {
            "400": answers(400),
            "500": answers(500),
            "503": answers(503),
            "dies": dies,
            "empty": answers(200, b" "),
            "cut": cut_short,
        }
        return await made[outcome](request)

    # What each says of itself.

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        size, dtype = self.said.get("block_size", str(BLOCK)), self.said.get("cache_dtype", "auto")
        sample = f'vllm:cache_config_info{{block_size="{size}",cache_dtype="{dtype}"}} 1.0'
        return web.Response(text=f"# TYPE vllm:cache_config_info gauge\n{sample}\n")

    async def _server_info(self, request: web.Request) -> web.StreamResponse:
        mode = {"both": "null"}.get(self.role, self.role)
        info = {"disaggregation_mode": mode, "model_path": "m", "page_size": 1, "dtype": "auto"}
        return web.json_response(info | self.said)

    async def _engine_info(self, request: web.Request) -> web.StreamResponse:
        info = {"tp_size": 1, "block_size": BLOCK, "num_gpu_blocks": 100} | self.said
        return web.json_response(json.dumps(info))

    async def _initialize(self, request: web.Request) -> web.StreamResponse:
        given = await request.json()
        assert given["local_engine_id"] == self.engine.url
        assert given["local_engine_config"]["block_size"] == self.said.get("block_size", BLOCK)
        ends = {"zmq_address": f"of {self.name}"}, [{"protocol": given["protocol"], "endpoint_info": self.name}]
        return web.json_response({"status": 1, "engine_endpoint_info": ends[0], "kvtransfer_endpoint_info": ends[1]})

    async def _connect(self, request: web.Request) -> web.StreamResponse:
        given = await request.json()
        assert given["remote_engine_endpoint_info"]["zmq_address"] != f"of {self.name}"
        self.linked.append((given["remote_engine_id"], given))
        return web.json_response({"status": 1})

    async def _free(self, request: web.Request) -> web.StreamResponse:
        given = await request.json()
        self.cache.free(f"{given['remote_engine_id']} {given['remote_session_id']}")
        return web.json_response({"status": "SUCCESS"})


End = Callable[[dict[str, Any]], Awaitable[web.StreamResponse]]
__all__ = ["BLOCK", "KINDS", "Cache", "Kin", "Outcome", "break_connection"]
