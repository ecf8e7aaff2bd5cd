"""The engine's control endpoint: contract, state, metrics, the fate of a handoff, cancel. HTTP on its own port.

It is where the router and `deeplink contract` look, because the engines' own error answers carry no reason. Every
request needs the bearer token derived from the shared secret. The processes that hold the cache are asked over
their channels, so this can live wherever the engine has one process that knows them all.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from aiohttp import web

from deeplink import secret as shared
from deeplink.errors import ConfigError, DeeplinkError
from deeplink.kvconnector import metrics
from deeplink.kvconnector.contracts import contract as co
from deeplink.kvconnector.contracts.contract import MAX_NAME
from deeplink.kvconnector.handoffs import channel as ch
from deeplink.kvconnector.handoffs.handoff import COMPLETE, NOT_BEGUN, merged
from deeplink.kvconnector.handoffs.stages import Stages
from deeplink.kvconnector.wires.tls import Tls
from deeplink.kvconnector.wires.visitors import Visitors

log = logging.getLogger(__name__)

MAX_BODY = 64 << 10
CLOSE_SECONDS = 5.0
ASK_SECONDS = 2.0
KEEP_SECONDS = 30.0
"""For the next request of a connection."""
MAX_WAIT_SECONDS = 60.0
"""For which a question is kept open until there is an answer to it."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """The engine's own blocks: how many there are and how many are held by requests now."""

    total: int
    held: int


class Control:
    """Serves in a thread of its own from `start` on; `close` ends it."""

    def __init__(
        self,
        contract: co.Contract,
        secret: bytes,
        blocks: Callable[[], Blocks],
        tls: Tls | None = None,
        *,
        early: bool = False,
    ) -> None:
        """`early`: a claim may be asked of it before its prefill has begun, and costs it nothing until then."""
        self._contract = contract
        self._early = early
        self._secret = secret
        self._token = shared.control_token(secret)
        self._blocks = blocks
        self._tls = tls
        self._loop = asyncio.new_event_loop()
        # All ranks stage in the same steps.
        self._stages = Stages(contract.ranks[0].channel, secret, tls, self._loop)
        self._thread: threading.Thread | None = None

    def start(self, host: str, port: int) -> int:
        """Bind (port 0: any) and serve; returns the port. Raises ConfigError when the address cannot be had."""
        app = web.Application(middlewares=[self._authenticate], client_max_size=MAX_BODY)
        app.router.add_get("/v1/contract", self._get_contract)
        app.router.add_get("/v1/status", self._get_status)
        app.router.add_get("/metrics", self._get_metrics)
        app.router.add_get("/v1/handoffs/{handoff}", self._get_handoff)
        app.router.add_get("/v1/handoffs/{handoff}/stage", self._get_stage)
        app.router.add_delete("/v1/handoffs/{handoff}", self._delete_handoff)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_SECONDS / 2, keepalive_timeout=KEEP_SECONDS)
        self._loop.run_until_complete(runner.setup())
        assert runner.server is not None
        self._visitors = Visitors(runner.server, self._loop)
        try:
            listening = self._loop.run_until_complete(self._loop.create_server(self._visitors, host, port))
        except OSError as exc:
            self._loop.run_until_complete(runner.cleanup())
            self._loop.close()
            raise ConfigError(
                f"the control endpoint cannot listen on {host}:{port}: {exc.strerror}",
                field="deeplink-control-port",
                remedy="choose another port with --deeplink-control-port",
            ) from exc
        bound: int = listening.sockets[0].getsockname()[1]
        arguments = runner, listening
        self._thread = threading.Thread(target=self._run, args=arguments, name="deeplink-control", daemon=True)
        self._thread.start()
        return bound

    def close(self) -> None:
        """Stop serving; when it returns the port is free, unless a handler takes longer than CLOSE_SECONDS."""
        self._stages.close()
        if self._thread is None:
            self._loop.close()
        elif self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_SECONDS)

    def _run(self, runner: web.AppRunner, listening: asyncio.Server) -> None:
        try:
            self._loop.run_forever()
            listening.close()
            self._loop.run_until_complete(runner.cleanup())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()

    @web.middleware
    async def _authenticate(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        self._visitors.asked(request)
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(errors="surrogateescape"), self._token.encode()):
            return web.json_response({"error": "the bearer token is not this engine's"}, status=401)
        return await handler(request)

    async def _get_contract(self, request: web.Request) -> web.Response:
        if "application/json" in request.headers.get("Accept", ""):
            return web.Response(body=co.to_json(self._contract), content_type="application/json")
        return web.Response(body=co.encode(self._contract), content_type="application/msgpack")

    async def _get_status(self, request: web.Request) -> web.Response:
        answers = await self._ask(ch.Ask(""))
        ended: Counter[str] = Counter()
        for answer in answers:
            ended.update(answer.ended)
        blocks = self._blocks()
        contract = self._contract
        return web.json_response(
            {
                "engine": contract.engine,
                "engine_version": contract.engine_version,
                "chip": contract.chip,
                "role": contract.role,
                "epoch": contract.epoch,
                "blocks": {"total": blocks.total, "held": blocks.held},
                "early": self._early,
                "staging": {
                    "capacity": sum(answer.staging_capacity for answer in answers),
                    "used": sum(answer.staging_used for answer in answers),
                },
                "claims": sum(answer.claims for answer in answers),
                "handoffs": sum(answer.handoffs for answer in answers),
                "ended": dict(ended),
                "late": sum(answer.late for answer in answers),
            }
        )

    async def _get_handoff(self, request: web.Request) -> web.Response:
        answers = await self._ask(ch.Ask(_handoff(request)))
        records = [answer.record for answer in answers if answer.record is not None]
        if not records:
            return web.json_response({"error": "no such handoff"}, status=404)
        return web.Response(body=msgspec.json.encode(merged(records)), content_type="application/json")

    async def _get_stage(self, request: web.Request) -> web.Response:
        """Answered once the prefill is further than `known`, or after `seconds`."""
        known = _number(request, "known", NOT_BEGUN, COMPLETE)
        seconds = _number(request, "seconds", 0, MAX_WAIT_SECONDS)
        return web.json_response({"stage": await self._stages.further(_handoff(request), int(known), seconds)})

    async def _delete_handoff(self, request: web.Request) -> web.Response:
        await self._ask(ch.Cancel(_handoff(request)))
        return web.Response(status=204)

    async def _get_metrics(self, request: web.Request) -> web.Response:
        """Of the ranks that answer: what is known is told when something is wrong, too."""
        answers = await self._answers(ch.Ask(""))
        blocks = self._blocks()
        there = [answer if isinstance(answer, ch.Answer) else None for answer in answers]
        body = metrics.render(self._contract, there, (blocks.total, blocks.held))
        return web.Response(body=body, headers={"Content-Type": metrics.CONTENT_TYPE})

    async def _ask(self, message: ch.Ask | ch.Cancel) -> list[ch.Answer]:
        answers = await self._answers(message)
        for answer in answers:
            if isinstance(answer, DeeplinkError):
                raise web.HTTPServiceUnavailable(
                    text=msgspec.json.encode(answer.reason()).decode(), content_type="application/json"
                ) from answer
        return [answer for answer in answers if isinstance(answer, ch.Answer)]

    async def _answers(self, message: ch.Ask | ch.Cancel) -> list[ch.Answer | DeeplinkError]:
        """Of each rank, or why there is none."""
        loop = asyncio.get_running_loop()

        def ask(address: str) -> ch.Answer | DeeplinkError:
            try:
                return ch.ask(address, self._secret, message, ASK_SECONDS, self._tls)
            except DeeplinkError as exc:
                return exc

        return await asyncio.gather(*(loop.run_in_executor(None, ask, rank.channel) for rank in self._contract.ranks))


def _number(request: web.Request, name: str, least: float, most: float) -> float:
    """Of the query; the least if it is not there."""
    text = request.query.get(name, str(least))
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise web.HTTPBadRequest(
            text=msgspec.json.encode({"error": f"{name} is not a number from {least:g} to {most:g}"}).decode(),
            content_type="application/json",
        )
    return value


def _handoff(request: web.Request) -> str:
    # No handoff has a longer name, and the process that is asked would take it for a broken message.
    return request.match_info["handoff"][:MAX_NAME]
