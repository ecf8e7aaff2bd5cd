"""A router in front of fake engines, on real sockets, and a client of it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from deeplink import config as configs
from deeplink.router.app import make_app
from deeplink.router.serve import serving

from .fake_engine import SECRET, FakeEngine, make_contract, running

SECONDS = 20.0


def check(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs one test body with a deadline."""
    asyncio.run(asyncio.wait_for(test(), SECONDS))


async def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.01)


@dataclass
class Rig:
    url: str
    client: aiohttp.ClientSession
    app: web.Application

    def post(self, body: Any = None, path: str = "/v1/completions", **more: Any) -> Any:
        return self.client.post(self.url + path, json=body, **more)

    async def complete(self, body: Any = None, path: str = "/v1/completions", **more: Any) -> Got:
        async with self.post(body, path, **more) as response:
            return Got(response.status, await response.read(), response.headers)

    async def get(self, path: str, **more: Any) -> Got:
        async with self.client.get(self.url + path, **more) as response:
            return Got(response.status, await response.read(), response.headers)


@dataclass
class Got:
    status: int
    data: bytes
    headers: Any

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.data)["error"]
        return error


def pair(**group: Any) -> tuple[FakeEngine, FakeEngine]:
    """A prefill and a decode engine that agree, unless `group` changes the decode engine's cache."""
    producer = FakeEngine("p", make_contract("prefill", channel="127.0.0.1:41"))
    return producer, FakeEngine("d", make_contract("decode", channel="127.0.0.1:42", **group))


@asynccontextmanager
async def router(
    *engines: FakeEngine, patience: float = 30.0, routes: Sequence[dict[str, Any]] = (), **section: Any
) -> AsyncIterator[Rig]:
    """A router that knows these engines, which run already."""
    config = configs.parse(
        {
            "router": {"port": 0, "poll": 0.1} | section,
            "engines": [
                {"name": e.name, "url": e.url, "control": e.control, "kind": e.kind} | e.declared for e in engines
            ],
            "routes": list(routes),
        },
        "test",
    )
    app = make_app(config, SECRET, patience=patience)
    async with (
        serving(app, config.router, shutdown=1.0) as port,
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=10)
        ) as client,
    ):
        yield Rig(f"http://127.0.0.1:{port}", client, app)


@asynccontextmanager
async def rig(*engines: FakeEngine, **section: Any) -> AsyncIterator[Rig]:
    async with running(*engines), router(*engines, **section) as made:
        yield made
