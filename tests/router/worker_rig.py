"""A router with workers, in processes of its own, and a client of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import pytest

from .fake_engine import SECRET, FakeEngine
from .rig import until

KEY = "admin-key-0123456789"
OPERATOR = {"Authorization": f"Bearer {KEY}"}
WORKERS = 2
SECONDS = 50.0

MARKS = [
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="who the workers are is read from /proc"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class Running:
    """A router with workers, in processes of its own."""

    def __init__(
        self, folder: Path, url: str, client: aiohttp.ClientSession, process: asyncio.subprocess.Process
    ) -> None:
        self.folder = folder
        self.url = url
        self.client = client
        self.process = process

    @property
    def workers(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(word) for word in children.split()]

    @property
    def said(self) -> str:
        """All that it has logged."""
        return (self.folder / "log").read_text()

    async def complete(self) -> None:
        """Until all workers run. Before that one must not be stopped: who starts it waits for it."""

        def run() -> bool:
            try:
                words = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in self.workers]
            except (FileNotFoundError, ProcessLookupError):  # one has just ended
                return False
            return sum(b"deeplink.router.worker" in word for word in words) == WORKERS

        await until(run)

    @asynccontextmanager
    async def only(self, worker: int) -> AsyncIterator[None]:
        """Whoever connects meanwhile is served by this one. The others are stopped when they have said all they had to:
        a client may have its answer before the owner has heard that the request is over, and it would count as work at
        its engine for as long."""
        await self.idle()
        others = [one for one in self.workers if one != worker]
        for one in others:
            os.kill(one, signal.SIGSTOP)
        try:
            await until(lambda: all(_state(one) == "T" for one in others))
            yield
        finally:
            for one in others:
                os.kill(one, signal.SIGCONT)

    async def ask(self, headers: Mapping[str, str] = MappingProxyType({}), **body: Any) -> tuple[int, bytes, str]:
        """On a connection of its own, so that any worker may get it."""
        headers = {"Connection": "close", **headers}
        async with self.client.post(self.url + "/v1/completions", json={"prompt": "x"} | body, headers=headers) as got:
            return got.status, await got.read(), got.headers.get("x-deeplink-path", "")

    async def get(self, path: str) -> Any:
        async with self.client.get(self.url + path, headers=OPERATOR | {"Connection": "close"}) as got:
            assert got.status == 200, await got.read()
            return await got.json(content_type=None) if path != "/metrics" else await got.text()

    async def engines(self) -> dict[str, dict[str, Any]]:
        """What operators are told, by name."""
        return {engine["name"]: engine for engine in (await self.get("/deeplink/v1/engines"))["engines"]}

    async def operate(self, method: str, path: str, body: Any = None) -> int:
        url = f"{self.url}/deeplink/v1/engines/{path}"
        async with self.client.request(method, url, json=body, headers=OPERATOR | {"Connection": "close"}) as got:
            return int(got.status)

    async def idle(self, seconds: float = 5.0) -> None:
        """Until nothing counts at any engine, no request waits and none is shown as running."""
        end = time.monotonic() + seconds
        while True:
            overview = await self.get("/deeplink/v1/overview")
            left = [(e["requests"], e["prefill_tokens"], e["decode_tokens"]) for e in overview["engines"]]
            if not any(map(any, left)) and not overview["queue"] and not overview["phases"]:
                return
            assert time.monotonic() < end, overview
            await asyncio.sleep(0.05)


def settings(folder: Path, *engines: FakeEngine, **section: Any) -> str:
    """deeplink.toml."""
    tables = {name: section.pop(name) for name in list(section) if isinstance(section[name], dict)}
    lines = [f"secret_file = {json.dumps(str(folder / 'secret'))}", "[router]", "poll = 0.1"]
    lines += [f"admin_keys_file = {json.dumps(str(folder / 'admin'))}"]
    lines += [f"{name} = {json.dumps(value)}" for name, value in section.items()]
    for name, table in tables.items():
        lines += [f"[router.{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    for engine in engines:
        named = {"name": engine.name, "url": engine.url, "control": engine.control, "kind": engine.kind}
        declared = dict(engine.declared)
        inner = declared.pop("settings", {})
        lines += ["[[engines]]", *(f"{key} = {json.dumps(value)}" for key, value in (named | declared).items())]
        if inner:
            lines += ["[engines.settings]", *(f"{key} = {json.dumps(value)}" for key, value in inner.items())]
    return "\n".join(lines)


@asynccontextmanager
async def workers(
    folder: Path,
    *engines: FakeEngine,
    killed: bool = False,
    more: Mapping[str, str] = MappingProxyType({}),
    **section: Any,
) -> AsyncIterator[Running]:
    """`killed`: the owner will have been, and so cannot end well; `more` is added to its environment. With `tls` its
    certificate is trusted."""
    (folder / "secret").write_bytes(SECRET)
    (folder / "admin").write_text(KEY)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    trusted = ssl.create_default_context(cafile=section["tls"]["certificate"]) if "tls" in section else None
    (folder / "deeplink.toml").write_text(settings(folder, *engines, port=port, **section))
    words = ["router", "--config", str(folder / "deeplink.toml"), "--workers", str(WORKERS)]
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            "from deeplink.cli import main; main()",
            *words,
            stdout=subprocess.DEVNULL,
            stderr=log,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **more},
        )
    timeout = aiohttp.ClientTimeout(total=20)
    try:
        connector = aiohttp.TCPConnector(limit=0, ssl=trusted or True)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
            made = Running(folder, f"{'https' if trusted else 'http'}://127.0.0.1:{port}", client, process)
            for _ in range(400):  # the owner listens before any worker does, so the first answer waits for one
                try:
                    async with client.get(f"{made.url}/health", headers={"Connection": "close"}):
                        break
                except aiohttp.ClientConnectorError:
                    await asyncio.sleep(0.05)
            else:
                pytest.fail("it does not listen")
            yield made
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        try:
            ended, said = await asyncio.wait_for(process.wait(), 15), (folder / "log").read_text()
            assert ended == (-signal.SIGKILL if killed else 0), said
            assert "Traceback" not in said, said
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


def _state(process: int) -> str:
    """As the kernel has it: T is stopped."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def check(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test(), SECONDS))
