"""The web page at /deeplink/: three files of our own, and a stream of what they show.

The page holds no data and is anyone's; what it shows needs an operator's key, like the metrics, and no key where
there are none. It asks for the key and keeps it for the tab.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from importlib import resources

from aiohttp import web
from aiohttp.typedefs import Handler

from deeplink.errors import Overloaded
from deeplink.router.overview import overview
from deeplink.router.parts import ADMISSION, FLEET, RECENT

ROOT = "/deeplink/"
FILES = {"": "text/html", "page.css": "text/css", "page.js": "text/javascript"}
DATA = "/deeplink/v1/overview"
SECONDS = 1.0
MOST = 32
"""Pages that look at the same time."""


@dataclass
class Looking:
    """How many pages are open; `over` ends them all."""

    pages: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)


_LOOKING = web.AppKey("looking", Looking)
_SAFE = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
PATHS = frozenset({ROOT.rstrip("/"), *(ROOT + name for name in FILES)})


def add_routes(app: web.Application) -> None:
    app[_LOOKING] = Looking()
    app.on_shutdown.append(_end)
    folder = resources.files("deeplink.router") / "web"
    for name, media in FILES.items():
        app.router.add_get(ROOT + name, _file((folder / (name or "page.html")).read_bytes(), media))
    app.router.add_get(ROOT.rstrip("/"), _move)
    app.router.add_get(DATA, _once)
    app.router.add_get(f"{DATA}/stream", _stream)


def _file(data: bytes, media: str) -> Handler:
    async def send(request: web.Request) -> web.StreamResponse:
        return web.Response(body=data, content_type=media, charset="utf-8", headers=_SAFE)

    return send


async def _end(app: web.Application) -> None:
    app[_LOOKING].over.set()


async def _move(request: web.Request) -> web.StreamResponse:
    raise web.HTTPPermanentRedirect(ROOT)


def _document(request: web.Request) -> bytes:
    app = request.app
    return json.dumps(overview(app[FLEET], app[ADMISSION], app[RECENT]), separators=(",", ":")).encode()


async def _once(request: web.Request) -> web.StreamResponse:
    return web.Response(body=_document(request), content_type="application/json", headers={"Cache-Control": "no-store"})


async def _stream(request: web.Request) -> web.StreamResponse:
    """Server-sent events, one a second, until the client leaves."""
    looking = request.app[_LOOKING]
    if looking.pages >= MOST:
        raise Overloaded(f"{MOST} pages look already")
    looking.pages += 1
    try:
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        while not looking.over.is_set():
            await response.write(b"data: " + _document(request) + b"\n\n")
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(looking.over.wait(), SECONDS)
        return response
    finally:
        looking.pages -= 1
