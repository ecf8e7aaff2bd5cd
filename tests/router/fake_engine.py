"""An engine that can be told what to do: an OpenAI endpoint and a control endpoint on real sockets."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web
from multidict import CIMultiDict

from deeplink import secret as shared
from deeplink.errors import Reason, TicketRefused
from deeplink.kvconnector.contracts import contract as contracts
from deeplink.kvconnector.contracts.contract import CacheGroup, Contract, Model, Rank
from deeplink.kvconnector.handoffs import ticket as tickets

SECRET = b"a secret for the tests only, 32b"
CHUNKS = [
    b'data: {"id":"1","object":"text_completion","choices":[{"index":0,"text":"caf\xc3\xa9"}]}\n\n',
    b': a comment\n\nevent: message\ndata:  {"id":"1",\ndata: "choices":[]}\n\n',
    b"data: [DONE]\n\n",
]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_contract(role: str, *, engine: str = "fake", channel: str = "127.0.0.1:7", **group: Any) -> Contract:
    sizes: dict[str, Any] = {
        "kind": "full",
        "layers": (0, 1),
        "heads": 2,
        "head_dim": 8,
        "dtype": "bfloat16",
        "block_size": 16,
        "layout": "block token head (kv dim)",
    }
    return Contract(
        engine=engine,
        engine_version="0",
        chip="cpu",
        role=role,
        epoch=secrets.token_hex(8),
        model=Model("Fake", 2, 100, "{}", "none", "f00d"),
        groups=(CacheGroup(**(sizes | group)),),
        ranks=(Rank(0, 0, 0, ((0, 2),), (0, 2), channel, {"tcp": channel}),),
    )


def completion(text: str = "hello") -> dict[str, Any]:
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "text": text, "finish_reason": "stop", "logprobs": None}],
    }


@dataclass
class Call:
    """One request that reached the API, and whether its client left before the answer."""

    path: str
    raw: bytes
    headers: CIMultiDict[str]
    query: str = ""
    cancelled: bool = False
    method: str = "POST"
    over: bool = False
    well: bool = False

    @property
    def body(self) -> Any:
        return json.loads(self.raw)

    @property
    def part(self) -> dict[str, str]:
        part: dict[str, str] = self.body["kv_transfer_params"]["deeplink"]
        return part

    @property
    def ticket(self) -> tickets.Ticket:
        return tickets.verify(self.part["ticket"], SECRET)


@dataclass
class FakeEngine:
    """`answer` decides what a completion request gets; the rest is written down for the tests to look at."""

    name: str
    contract: Contract
    answer: Handler | None = None
    delay: float = 0.0
    check_epoch: bool = True
    calls: list[Call] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    listings: list[CIMultiDict[str]] = field(default_factory=list)
    reason: Reason | None = None
    state: str = "failed"
    url: str = ""
    control: str = ""
    polls: int = 0
    held: int = 0
    early: bool = False
    stages: asyncio.Queue[int] | None = None
    watched: list[str] = field(default_factory=list)
    kind: str = "deeplink"
    declared: dict[str, Any] = field(default_factory=dict)
    well: bool = True
    ailing: float = 0.0
    """Seconds until it says whether it is well."""
    model: str = ""
    health_headers: list[CIMultiDict[str]] = field(default_factory=list)
    others: dict[str, Any] = field(default_factory=dict)
    _runners: list[web.AppRunner] = field(default_factory=list)
    _servers: list[web.Server] = field(default_factory=list)

    async def start(self) -> None:
        api = web.Application(client_max_size=1 << 30)
        for path in ("/v1/completions", "/v1/chat/completions"):
            api.router.add_post(path, self._complete)
        api.router.add_get("/v1/models", self._models)
        api.router.add_get("/health", self._health)
        api.router.add_route("*", "/{path:.*}", self._other)
        control = web.Application()
        control.router.add_get("/v1/contract", self._contract)
        control.router.add_get("/v1/status", self._status)
        control.router.add_get("/v1/handoffs/{id}", self._handoff)
        control.router.add_get("/v1/handoffs/{id}/stage", self._stage)
        control.router.add_delete("/v1/handoffs/{id}", self._delete)
        self.url = await self._serve(api, self.url)
        self.control = await self._serve(control, self.control)

    async def stop(self) -> None:
        while self._runners:
            await self._runners.pop().cleanup()
        # A connection that was just being accepted is not among those that were ended with the listener.
        await asyncio.sleep(0.01)
        for server in self._servers:
            await server.shutdown(0)

    async def stop_api(self) -> None:
        """The control endpoint stays up."""
        await self._runners.pop(0).cleanup()

    async def stop_control(self) -> None:
        """The API stays up."""
        await self._runners.pop(1).cleanup()

    def restart(self) -> None:
        self.contract = msgspec.structs.replace(self.contract, epoch=secrets.token_hex(8))

    async def _serve(self, app: web.Application, url: str) -> str:
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        port = int(url.rpartition(":")[2]) if url else 0
        site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True)
        await site.start()
        self._runners.append(runner)
        assert runner.server is not None
        self._servers.append(runner.server)
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        call = Call(request.path, await request.read(), request.headers.copy(), request.query_string)
        self.calls.append(call)
        try:
            if self.check_epoch and (refused := self._refusal(call)):
                self.reason = refused.reason()
                call.over = True
                return web.json_response({"error": {"message": "engine error", "code": 500}}, status=500)
            if self.delay:
                await asyncio.sleep(self.delay)
            if self.answer is not None:
                answer = await self.answer(request)
                call.over, call.well = True, answer.status == 200 and not broken(request)
                return answer
            if call.body.get("stream"):
                return await stream(request, CHUNKS)
            return web.json_response(completion(), headers={"X-Request-Id": "r-1"})
        except (asyncio.CancelledError, ConnectionResetError):
            call.cancelled = True
            raise

    async def _health(self, request: web.Request) -> web.Response:
        self.health_headers.append(request.headers.copy())
        await asyncio.sleep(self.ailing)
        return web.Response(status=200 if self.well else 503)

    async def _other(self, request: web.Request) -> web.StreamResponse:
        """What `others` has for the path: a handler, or what it would answer."""
        if request.path not in self.others:
            raise web.HTTPNotFound
        call = Call(request.path, await request.read(), request.headers.copy(), request.query_string)
        call.method = request.method
        self.calls.append(call)
        answer = self.others[request.path]
        return await answer(request) if callable(answer) else web.json_response(answer)

    def _refusal(self, call: Call) -> TicketRefused | None:
        if "kv_transfer_params" not in call.body:
            return None
        ticket, side = call.ticket, call.part["side"]
        theirs = ticket.producer if side == "produce" else ticket.consumer
        if theirs == self.contract.epoch:
            return None
        return TicketRefused("the ticket is for another incarnation", field="epoch", ours="new", theirs="old")

    async def _models(self, request: web.Request) -> web.Response:
        self.listings.append(request.headers.copy())
        model = {"id": self.model or f"model of {self.name}", "object": "model"}
        return web.json_response({"object": "list", "data": [model]})

    async def _contract(self, request: web.Request) -> web.Response:
        self._check(request)
        self.polls += 1
        return web.Response(body=contracts.encode(self.contract), content_type="application/msgpack")

    async def _status(self, request: web.Request) -> web.Response:
        self._check(request)
        return web.json_response({"engine": "fake", "blocks": {"total": 100, "held": self.held}, "early": self.early})

    async def _handoff(self, request: web.Request) -> web.Response:
        self._check(request)
        state = {
            "handoff": request.match_info["id"],
            "side": "producer",
            "state": self.state,
            "reason": msgspec.to_builtins(self.reason),
            "tokens": 1,
            "kv_bytes": 1,
            "milliseconds": 1.0,
            "digest": "",
        }
        return web.json_response(state)

    async def _stage(self, request: web.Request) -> web.Response:
        """The next of `stages`, once there is one; an engine without any does not know the question."""
        self._check(request)
        if self.stages is None:
            raise web.HTTPNotFound
        self.watched.append(request.match_info["id"])
        return web.json_response({"stage": await self.stages.get()})

    async def _delete(self, request: web.Request) -> web.Response:
        self._check(request)
        self.deleted.append(request.match_info["id"])
        return web.Response(status=204)

    def _check(self, request: web.Request) -> None:
        if request.headers.get("Authorization") != f"Bearer {shared.control_token(SECRET)}":
            raise web.HTTPUnauthorized


async def stream(
    request: web.Request, chunks: list[bytes], *, gap: float = 0.0, die: bool = False
) -> web.StreamResponse:
    """Sends these bytes as a stream; with `die` the connection breaks after them."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for chunk in chunks:
        await response.write(chunk)
        await asyncio.sleep(gap)
    if die:
        break_connection(request)
        return response
    await response.write_eof()
    return response


def broken(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


def break_connection(request: web.Request) -> None:
    assert request.transport is not None
    request.transport.close()


def answers(status: int, body: object = None, **headers: str) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        data = body if isinstance(body, bytes) else json.dumps(body or {"error": {"message": "no"}}).encode()
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(status=status, body=data, headers={"Content-Type": "application/json", **given})

    return answer


def streams(*chunks: bytes, gap: float = 0.0, die: bool = False) -> Handler:
    return lambda request: stream(request, list(chunks), gap=gap, die=die)


async def dies(request: web.Request) -> web.StreamResponse:
    """Breaks the connection without an answer."""
    break_connection(request)
    await asyncio.sleep(5)
    return web.Response()


async def cut_short(request: web.Request) -> web.StreamResponse:
    """Promises more bytes than it sends."""
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "100"})
    await response.prepare(request)
    await response.write(b'{"id":')
    break_connection(request)
    return response


@asynccontextmanager
async def running(*engines: FakeEngine) -> AsyncIterator[None]:
    try:
        for engine in engines:
            await engine.start()
        yield
    finally:
        for engine in engines:
            await engine.stop()
