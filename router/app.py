"""The router put together, and its own paths: health, metrics, the page and the operators' API."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from deeplink import secret as shared
from deeplink.config import Config
from deeplink.errors import DeeplinkError, Unauthorized
from deeplink.plugins import load_plugins
from deeplink.registry import Registry
from deeplink.router import admin, inner, openai, page
from deeplink.router.admission import Admission
from deeplink.router.api import JSON, Api, failed
from deeplink.router.choice import Shut, choose
from deeplink.router.control import Control
from deeplink.router.engine import DEEPLINK, PLAIN
from deeplink.router.fleet import PATIENCE_SECONDS, Fleet
from deeplink.router.flow import Flow
from deeplink.router.keys import Keys
from deeplink.router.keys import load as load_keys
from deeplink.router.kinds import Kind
from deeplink.router.kv_listen import Listeners
from deeplink.router.listed import Listed
from deeplink.router.metrics import Metrics
from deeplink.router.parts import (
    ADMISSION,
    API,
    CONFIG,
    FLEET,
    LISTED,
    METRICS,
    RECENT,
    REGISTERED,
    SHARED,
    SPANS,
)
from deeplink.router.policy import Policy
from deeplink.router.recent import Recent
from deeplink.router.registered import Registered
from deeplink.router.shared import Shared
from deeplink.router.tracing import Spans
from deeplink.router.upstream import Upstream

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
    app = web.Application(
        middlewares=[_errors, _keys(admin_keys, Keys([shared.control_token(secret)]))],
        client_max_size=inner.MAX_BODY,
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
    app.cleanup_ctx.append(lambda app: _parts(app, config, secret, policies, plugins.kinds, keys, path, patience))
    app.router.add_get("/health", _health)
    app.router.add_get("/metrics", admin.metrics)
    page.add_routes(app)
    app[RECENT] = Recent()
    admin.add_registration(app.router)
    if admin_keys is not None:
        admin.add_routes(app.router)
    return app


async def _parts(
    app: web.Application,
    config: Config,
    secret: bytes,
    policies: Registry[Policy],
    kinds: Registry[Kind],
    keys: Keys | None,
    path: Path | None,
    patience: float,
) -> AsyncIterator[None]:
    upstream, control = Upstream(), Control(secret)
    try:
        async with Fleet(config, control, patience, kinds) as fleet:
            app[FLEET] = fleet
            admission = app[ADMISSION] = Admission(fleet, config.router, policies, config.routes)
            metrics = app[METRICS] = Metrics(fleet, admission)
            flow = Flow(fleet, admission, upstream, control, secret, config.router)
            spans = app.get(SPANS)
            app[API] = Api(config.router, keys, fleet, flow, upstream, metrics, app[RECENT], spans)
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


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure in the shape OpenAI clients read."""
    try:
        return await handler(request)
    except DeeplinkError as exc:
        # As it was sent: a path may hold line ends once it is decoded.
        log.info("%s status=%d code=%s", request.rel_url.raw_path, exc.status, exc.code)
        request.app[METRICS].refused(str(exc.status), exc.code)
        status, headers, body = failed(exc, [])
        return web.Response(status=status, headers=headers, body=body)
    except web.HTTPException as exc:
        if exc.status < 400:
            raise
        code = {404: "not_found", 405: "method_not_allowed"}.get(exc.status, "http_error")
        message = f"{request.method} {request.path}: {exc.reason}"
        allow = [("Allow", exc.headers["Allow"])] if "Allow" in exc.headers else []
        return web.Response(status=exc.status, headers=JSON + allow, body=openai.error(exc.status, code, message))


def _keys(operators: Keys | None, engines: Keys) -> Middleware:
    """Who may ask for what: /health is anyone's, the admin API and the metrics are the operators', registering is for
    engines. Clients' keys are looked at elsewhere (`Api.limit`)."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        path = request.path
        needed = None if path == "/health" or path in page.PATHS else operators
        if path.startswith(admin.REGISTRATIONS):
            needed = engines
        if needed is not None and not needed.open_with(request.headers.get("Authorization", "")):
            raise Unauthorized("the request has no key that opens this", remedy="send Authorization: Bearer KEY")
        return await handler(request)

    return check
