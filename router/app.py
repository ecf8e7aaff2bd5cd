"""The HTTP endpoint: OpenAI's API towards clients, everything else behind `Flow`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from deeplink import secret as shared
from deeplink.config import Config
from deeplink.errors import DeeplinkError, InvalidRequest, NoEngine, RequestTooLarge, RouteError, Unauthorized
from deeplink.plugins import load_plugins
from deeplink.registry import Registry
from deeplink.router import admin, openai, page
from deeplink.router import body as bodies
from deeplink.router.admission import Admission
from deeplink.router.choice import Shut, choose
from deeplink.router.control import Control
from deeplink.router.engine import DEEPLINK, PLAIN
from deeplink.router.exchange import GENERATING, Answer, Exchange
from deeplink.router.fleet import PATIENCE_SECONDS, Fleet
from deeplink.router.flow import Flow
from deeplink.router.headers import Headers, to_client, to_engine
from deeplink.router.keys import Keys
from deeplink.router.keys import load as load_keys
from deeplink.router.kinds import Kind
from deeplink.router.kv_listen import Listeners
from deeplink.router.listed import Listed
from deeplink.router.metrics import Metrics
from deeplink.router.parts import (
    ADMISSION,
    CONFIG,
    FLEET,
    FLOW,
    LISTED,
    METRICS,
    RECENT,
    REGISTERED,
    SHARED,
    SPANS,
    UPSTREAM,
)
from deeplink.router.paths import passes
from deeplink.router.policy import Policy
from deeplink.router.recent import Recent
from deeplink.router.registered import Registered
from deeplink.router.shared import Shared
from deeplink.router.tracing import Spans
from deeplink.router.upstream import Lost, Upstream

UPLOAD_SECONDS = 60.0
MODELS_SECONDS = 10.0
MAX_MODELS = 4 << 20
METHODS = ("GET", "POST", "DELETE")
"""What engines' APIs are called with."""
_JSON = [("Content-Type", "application/json")]

log = logging.getLogger(__name__)


def make_app(
    config: Config, secret: bytes, *, path: Path | None = None, patience: float = PATIENCE_SECONDS
) -> web.Application:
    """Serve it with ``handler_cancellation=True``: a client that leaves must end what runs for it.

    The engines are those of `config`, and what becomes of them in the file at `path`. An engine that is down and silent
    for `patience` seconds is given up, with the calls that wait for it.
    """
    keys = load_keys(config.router.keys_file, "router.keys_file")
    admin_keys = load_keys(config.router.admin_keys_file, "router.admin_keys_file")
    # The body of an inference request is read, and its size checked, in `_read`.
    app = web.Application(
        middlewares=[_errors, _keys(keys, admin_keys, Keys([shared.control_token(secret)]))],
        client_max_size=admin.MAX_BODY,
    )
    app[CONFIG] = config
    if config.router.tracing:
        app[SPANS] = Spans()
    plugins = load_plugins()
    policies = plugins.policies
    for entry in config.engines:
        if entry.kind not in (DEEPLINK, PLAIN):
            plugins.kinds.get(entry.kind)
    for name in (config.router.prefill_policy, config.router.decode_policy):
        policies.get(name)
    app.cleanup_ctx.append(lambda app: _parts(app, config, secret, policies, plugins.kinds, path, patience))
    for generating in GENERATING:
        app.router.add_post(generating, _serve)
    app.router.add_get("/v1/models", _models)
    app.router.add_get("/health", _health)
    app.router.add_get("/metrics", admin.metrics)
    page.add_routes(app)
    app[RECENT] = Recent()
    admin.add_registration(app.router)
    if admin_keys is not None:
        admin.add_routes(app.router)
    app.router.add_route("*", "/{path:.*}", _pass)
    return app


async def _parts(
    app: web.Application,
    config: Config,
    secret: bytes,
    policies: Registry[Policy],
    kinds: Registry[Kind],
    path: Path | None,
    patience: float,
) -> AsyncIterator[None]:
    upstream, control = Upstream(), Control(secret)
    try:
        async with Fleet(config, control, patience, kinds) as fleet:
            app[UPSTREAM], app[FLEET] = upstream, fleet
            admission = app[ADMISSION] = Admission(fleet, config.router, policies, config.routes)
            app[METRICS] = Metrics(fleet, admission)
            app[FLOW] = Flow(fleet, admission, upstream, control, secret, config.router)
            listed = app[LISTED] = Listed(path, config, fleet)
            shared = app[SHARED] = Shared(config.router.redis, secret, fleet, admission)
            registered = app[REGISTERED] = Registered(fleet, shared)
            listeners = Listeners(admission.index)

            def changed() -> None:
                admission.changed()
                listeners.set(fleet.table.engines)

            changed()
            fleet.on_change = changed
            listed.on_routes = admission.route
            tasks = [asyncio.create_task(work) for work in (listed.follow(), registered.watch(), shared.run())]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks, timeout=2.0)
                await listeners.close()
    finally:
        await control.close()
        await upstream.close()
        if SPANS in app:
            await asyncio.to_thread(app[SPANS].close)


async def _serve(request: web.Request) -> web.StreamResponse:
    raw = await _read(request, request.app[CONFIG].router.max_body)
    return await _answer(request, bodies.parse(raw))


async def _pass(request: web.Request) -> web.StreamResponse:
    """Any other path that some engine may serve."""
    path, section = request.path, request.app[CONFIG].router
    if path in GENERATING:
        raise web.HTTPMethodNotAllowed(request.method, ["POST"])
    if not passes(path, section.paths):
        raise web.HTTPNotFound
    if request.method not in METHODS:
        raise web.HTTPMethodNotAllowed(request.method, METHODS)
    raw = await _read(request, section.max_body)
    return await _answer(request, bodies.other(raw, request.content_type))


async def _answer(request: web.Request, body: bodies.Body) -> web.StreamResponse:
    began = time.monotonic()
    exchange = Exchange(request.path, request.path_qs, _headers(request), body, method=request.method)
    spans = request.app[CONFIG].router.tracing and request.app[SPANS]
    if not spans:
        return await _served(request, exchange, began)
    with spans.request(exchange.method, exchange.path, exchange.headers) as trace:
        exchange.trace = trace
        return await _served(request, exchange, began)


async def _served(request: web.Request, exchange: Exchange, began: float) -> web.StreamResponse:
    metrics, recent = request.app[METRICS], request.app[RECENT]
    recent.begun(exchange)
    first = 0.0
    response: web.StreamResponse | None = None
    failure: DeeplinkError | None = None
    try:
        async with request.app[FLOW].serve(exchange) as answer:
            response = _response(answer, exchange)
            first = time.monotonic() - began
            metrics.first_byte(exchange, first)
            if not isinstance(answer.body, bytes):
                await response.prepare(request)
                async for chunk in answer.body:
                    await response.write(chunk)
                await response.write_eof()
    except DeeplinkError as exc:
        failure = exc
        response = _failed(exc, exchange)
    except (asyncio.CancelledError, ConnectionResetError):
        _note(metrics, recent, exchange, "gone", None, began, first)
        raise
    _note(metrics, recent, exchange, str(response.status), failure or exchange.error, began, first)
    return response


def _headers(request: web.Request) -> Headers:
    """For an engine; without the key, if that is the router's."""
    return to_engine(request.headers.items(), key=request.app[CONFIG].router.keys_file is None)


async def _models(request: web.Request) -> web.StreamResponse:
    fleet = request.app[FLEET]
    if all(engine.down for engine in fleet.table.engines):
        await fleet.look()
    up = sorted((e for e in fleet.table.engines if not e.down), key=lambda engine: not engine.consumes)
    if not up:
        raise NoEngine("no engine is up")
    url, headers = up[0].url + request.path_qs, _headers(request)
    try:
        answer = await asyncio.wait_for(_fetch(request.app[UPSTREAM], url, headers), MODELS_SECONDS)
    except asyncio.TimeoutError as exc:
        raise RouteError(f"engine {up[0].name} did not answer within {MODELS_SECONDS:g} s") from exc
    except Lost as exc:
        raise RouteError(f"engine {up[0].name}: {exc}") from exc
    return web.Response(status=answer.status, headers=answer.headers, body=answer.body)


async def _fetch(upstream: Upstream, url: str, headers: Headers) -> Answer:
    reply = await upstream.get(url, headers)
    try:
        return Answer(reply.status, to_client(reply.headers), await reply.read(MAX_MODELS))
    finally:
        reply.close()


async def _health(request: web.Request) -> web.StreamResponse:
    table = request.app[FLEET].table
    try:
        choose(table, handoff=True, pick=lambda _, engines: engines[0], shut=_lasting(request.app[ADMISSION]))
    except DeeplinkError as exc:
        status, why = 503, str(exc)
    else:
        status, why = 200, ""
    engines = {engine.name: {"up": not engine.down, "role": engine.role or None} for engine in table.engines}
    return web.json_response({"ok": not why, "reason": why, "engines": engines}, status=status)


def _lasting(admission: Admission) -> dict[str, Shut]:
    """Engines that take no requests; being full passes."""
    return {name: shut for name, shut in admission.shut().items() if not shut.full}


async def _read(request: web.Request, limit: int) -> bytes:
    """The request's body. Raises RequestTooLarge once it is known to be, InvalidRequest if it does not
    arrive."""
    too_large = RequestTooLarge(f"the request body is larger than router.max_body, {limit} bytes")
    if (request.content_length or 0) > limit:
        raise too_large

    async def read() -> bytes:
        data = bytearray()
        async for chunk in request.content.iter_any():
            data += chunk
            if len(data) > limit:
                raise too_large
        return bytes(data)

    try:
        return await asyncio.wait_for(read(), UPLOAD_SECONDS)
    except asyncio.TimeoutError as exc:
        raise InvalidRequest(f"the request body did not arrive within {UPLOAD_SECONDS:g} s") from exc
    except web.RequestPayloadError as exc:
        raise InvalidRequest("the request body could not be read") from exc


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure in the shape OpenAI clients read."""
    try:
        return await handler(request)
    except DeeplinkError as exc:
        # As it was sent: a path may hold line ends once it is decoded.
        log.info("%s status=%d code=%s", request.rel_url.raw_path, exc.status, exc.code)
        request.app[METRICS].refused(str(exc.status), exc.code)
        return _failed(exc, None)
    except web.HTTPException as exc:
        if exc.status < 400:
            raise
        code = {404: "not_found", 405: "method_not_allowed"}.get(exc.status, "http_error")
        message = f"{request.method} {request.path}: {exc.reason}"
        allow = [("Allow", exc.headers["Allow"])] if "Allow" in exc.headers else []
        return web.Response(status=exc.status, headers=_JSON + allow, body=openai.error(exc.status, code, message))


def _keys(inference: Keys | None, operators: Keys | None, engines: Keys) -> Middleware:
    """Who may ask for what: /health is anyone's, the admin API and the metrics are the operators', registering is for
    engines, the rest the clients'."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        path = request.path
        needed = None if path == "/health" or path in page.PATHS else inference
        if path.startswith(admin.REGISTRATIONS):
            needed = engines
        elif path == "/metrics" or path.startswith(admin.ROOT + "/"):
            needed = operators
        if needed is not None and not needed.open_with(request.headers.get("Authorization", "")):
            raise Unauthorized("the request has no key that opens this", remedy="send Authorization: Bearer KEY")
        return await handler(request)

    return check


def _response(answer: Answer, exchange: Exchange) -> web.StreamResponse:
    headers = answer.headers + exchange.marks()
    if isinstance(answer.body, bytes):
        return web.Response(status=answer.status, headers=headers, body=answer.body)
    return web.StreamResponse(status=answer.status, headers=headers)


def _failed(failure: DeeplinkError, exchange: Exchange | None) -> web.Response:
    headers = _JSON + (exchange.marks() if exchange else [])
    if failure.status == 401:
        headers = [*headers, ("WWW-Authenticate", "Bearer")]
    if failure.status == 429:
        headers = [*headers, ("Retry-After", "1")]
    return web.Response(status=failure.status, headers=headers, body=openai.body(failure))


def _note(
    metrics: Metrics,
    recent: Recent,
    exchange: Exchange,
    status: str,
    failure: DeeplinkError | None,
    began: float,
    first: float,
) -> None:
    """One line in the log and one request in the metrics. Nothing of what was asked or answered is in either:
    messages may quote."""
    seconds = time.monotonic() - began
    code = failure.code if failure else ""
    metrics.ended(exchange, status, code, seconds)
    recent.ended(exchange, status, code, first, seconds)
    words = {
        "status": status,
        "phase": exchange.phase,
        "handoff": exchange.handoff,
        "prefill": exchange.prefill,
        "decode": exchange.decode,
        "retries": str(exchange.tried or ""),
        "code": code,
        "field": failure.field if failure else "",
        "ms": f"{1000 * seconds:.0f}",
    }
    if exchange.trace is not None:
        exchange.trace.ended(status, words)
    log.info("%s", f"{exchange.path} " + " ".join(f"{name}={value}" for name, value in words.items() if value))
