"""The operators' API: which engines there are, and whether they get new requests; and where engines register. JSON.

Operators have keys of their own, engines the token of the control endpoints.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from aiohttp import web
from pydantic import ValidationError

from deeplink.config import EngineEntry
from deeplink.errors import InvalidRequest
from deeplink.router import openapi
from deeplink.router.engine import DEEPLINK, PLAIN, Engine
from deeplink.router.parts import ADMISSION, FLEET, METRICS, REGISTERED, SHARED
from deeplink.router.registered import Heartbeat

Entry = TypeVar("Entry", bound=EngineEntry)

ROOT = "/deeplink/v1"
REGISTRATIONS = f"{ROOT}/registrations/"
BODY_SECONDS = 10.0


def add_registration(router: web.UrlDispatcher) -> None:
    router.add_put(f"{REGISTRATIONS}{{name}}", _register)
    router.add_delete(f"{REGISTRATIONS}{{name}}", _leave)


def add_routes(router: web.UrlDispatcher) -> None:
    router.add_get(f"{ROOT}/openapi.json", _described)
    router.add_get(f"{ROOT}/engines", _list)
    router.add_get(f"{ROOT}/engines/{{name}}", _show)
    router.add_put(f"{ROOT}/engines/{{name}}", _put)
    router.add_delete(f"{ROOT}/engines/{{name}}", _remove)
    router.add_post(f"{ROOT}/engines/{{name}}/drain", _drain)
    router.add_delete(f"{ROOT}/engines/{{name}}/drain", _undrain)


async def metrics(request: web.Request) -> web.StreamResponse:
    made = request.app[METRICS]
    return web.Response(body=made.text(), headers={"Content-Type": made.content_type})


async def _described(request: web.Request) -> web.StreamResponse:
    return web.json_response(openapi.document())


async def _list(request: web.Request) -> web.StreamResponse:
    engines = request.app[FLEET].table.engines
    return web.json_response({"engines": [_state(request, engine) for engine in engines]})


async def _show(request: web.Request) -> web.StreamResponse:
    return web.json_response(_state(request, _engine(request)))


async def _put(request: web.Request) -> web.StreamResponse:
    """Adds the engine or says where it is now; looked at before this answers."""
    entry = await _given(request, EngineEntry)
    request.app[FLEET].put(entry)
    request.app[SHARED].put(entry)
    await request.app[FLEET].look((entry.name,))
    return web.json_response(_state(request, _engine(request)))


async def _remove(request: web.Request) -> web.StreamResponse:
    """Requests that run at the engine go on."""
    engine = _engine(request)
    request.app[FLEET].remove(engine.name)
    request.app[SHARED].remove(engine.name)
    return web.Response(status=204)


async def _drain(request: web.Request) -> web.StreamResponse:
    """No new requests from now on; the answer tells how many still run."""
    engine = _engine(request)
    request.app[ADMISSION].draining.add(engine.name)
    request.app[SHARED].drain(engine.name, True)
    return web.json_response(_state(request, engine))


async def _undrain(request: web.Request) -> web.StreamResponse:
    engine = _engine(request)
    admission = request.app[ADMISSION]
    admission.draining.discard(engine.name)
    request.app[SHARED].drain(engine.name, False)
    admission.queue.wake()
    return web.json_response(_state(request, engine))


async def _register(request: web.Request) -> web.StreamResponse:
    beat = await _given(request, Heartbeat)
    await request.app[REGISTERED].heard(beat)
    return web.json_response({"name": beat.name, "seconds": beat.seconds})


async def _leave(request: web.Request) -> web.StreamResponse:
    given, sequence = request.query.get("sequence"), None
    if given is not None:
        if not (given.isascii() and given.isdigit() and len(given) < 20):
            raise InvalidRequest("the farewell's number is none", field="sequence", theirs=given[:200])
        sequence = int(given)
    request.app[REGISTERED].leave(request.match_info["name"], request.query.get("epoch"), sequence)
    return web.Response(status=204)


async def _given(request: web.Request, kind: type[Entry]) -> Entry:
    """The body as what it should be, of the engine that the path names."""
    name = request.match_info["name"]
    try:
        given = await asyncio.wait_for(request.json(), BODY_SECONDS)
        if not isinstance(given, dict) or given.setdefault("name", name) != name:
            raise InvalidRequest("the body is not an engine of that name")
        entry = kind.model_validate(given, strict=True)
        known = (DEEPLINK, PLAIN, *request.app[FLEET].kinds.items)
        if entry.kind not in known:
            raise InvalidRequest(
                "no plugin has engines of that kind", field="kind", theirs=entry.kind, ours=", ".join(known)
            )
        return entry
    except asyncio.TimeoutError as exc:
        raise InvalidRequest(f"the request body did not arrive within {BODY_SECONDS:g} s") from exc
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(f"{first['msg']}", field=where, theirs=repr(first["input"])[:200]) from exc
    except (ValueError, LookupError) as exc:  # the latter for a charset that does not exist
        raise InvalidRequest("the request body is not JSON") from exc


def _engine(request: web.Request) -> Engine:
    name = request.match_info["name"]
    for engine in request.app[FLEET].table.engines:
        if engine.name == name:
            return engine
    raise web.HTTPNotFound(reason=f"no engine is named {name[:100]!r}".encode("ascii", "replace").decode())


def _state(request: web.Request, engine: Engine) -> dict[str, Any]:
    admission, contract, name = request.app[ADMISSION], engine.contract, engine.name
    shut, given = admission.shut().get(name), admission.load.of(name)
    return {
        "name": name,
        "url": engine.url,
        "control": engine.control,
        "weight": engine.weight,
        "up": not engine.down,
        "why": engine.down,
        "kind": engine.kind,
        "role": engine.role or None,
        "chip": contract.chip if contract else engine.settings.get("chip"),
        "epoch": contract.epoch if contract else None,
        "draining": name in admission.draining,
        "shut": shut.why if shut else "",
        "kv_use": round(request.app[FLEET].use(name), 4),
        "cache": {"exact": not (why := admission.index.why(name)), "why": why} if engine.events else None,
        "requests": given.requests,
        "tokens": {"prefill": given.prefill, "decode": given.decode},
    }
