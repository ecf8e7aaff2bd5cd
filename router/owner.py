"""Several workers on one port, and the one process that owns what they must know together: this one.

It looks at the engines, counts what each was given, chooses, and answers operators; clients' bytes pass through the
workers alone. They inherit one listening socket, so a connection that waits to be accepted outlives a worker that is
killed. One that ends is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import tempfile
import time
from asyncio.subprocess import Process
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
from aiohttp import web

from deeplink.config import Config
from deeplink.errors import ConfigError
from deeplink.router.app import make_app
from deeplink.router.desk import Desks
from deeplink.router.keys import load as load_keys
from deeplink.router.parts import ADMISSION, FLEET, LISTED, METRICS, RECENT
from deeplink.router.serve import SHUTDOWN_SECONDS, load_tls, loop_runner
from deeplink.router.worker import LIBRARY, OWNER, Start, written

BACKLOG = 1024
MOST_SECONDS = 2.0
"""Between two starts of a worker that does not stay."""
STAYS = 3.0
"""Seconds after which one has."""
MORE_SECONDS = 10.0
"""For a worker to end after its requests had their time."""

log = logging.getLogger(__name__)


def run(config: Config, secret: bytes, path: Path | None, workers: int) -> None:
    """As `serve.run`, with `workers` processes that serve."""
    loop_runner()(_run(config, secret, path, workers))


async def _run(config: Config, secret: bytes, path: Path | None, workers: int) -> None:
    section = config.router
    load_tls(section.tls)  # what is wrong with it is said once, and here
    app = make_app(config, secret, path=path)
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        listening = stack.enter_context(bound(section.host, section.port))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="deeplink-router-"))
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.UnixSite(runner, f"{folder}/{LIBRARY}").start()
        desks = Desks(app[FLEET], app[ADMISSION], app[METRICS], app[RECENT])
        before = app[FLEET].on_change

        def changed() -> None:
            before()
            desks.changed()

        app[FLEET].on_change = changed
        server = await loop.create_unix_server(desks.new, f"{folder}/{OWNER}")
        stack.callback(server.close)
        watching = asyncio.create_task(desks.watch())
        stack.callback(watching.cancel)
        keys = load_keys(section.keys_file, "router.keys_file")
        start = Start(written(config), secret, keys.digests if keys else None, folder, listening.fileno())
        keeping = [asyncio.create_task(_keep(number, start, stop)) for number in range(workers)]
        loop.add_signal_handler(signal.SIGHUP, app[LISTED].look_now)
        scheme = "https" if section.tls else "http"
        log.info("listening on %s://%s:%d with %d workers", scheme, *listening.getsockname()[:2], workers)
        await stop.wait()
        await app.shutdown()  # what would never end by itself, and so would keep its worker
        await asyncio.wait(keeping)


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens there; the caller closes it. Raises OSError, or ConfigError for a host of several
    addresses, of which workers could share one only."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    addresses = {(family, address) for family, _, _, _, address in found}
    if len(addresses) != 1:
        raise ConfigError(
            "several workers share one address, and this host has several",
            field="router.host",
            theirs=", ".join(sorted(str(address[0]) for _, address in addresses)),
            remedy="name one of them, or use one worker",
        )
    (family, address) = addresses.pop()
    made = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    made.setblocking(False)
    return made


async def _keep(number: int, start: Start, stop: asyncio.Event) -> None:
    """One worker, started again whenever it ends, until `stop`."""
    pause = 0.0
    stopping = asyncio.create_task(stop.wait())
    while not stop.is_set():
        began = time.monotonic()
        try:
            process = await _started(start)
        except OSError as exc:
            log.error("worker %d cannot be started: %s", number, exc.strerror or exc)
            await asyncio.wait((stopping,), timeout=MOST_SECONDS)
            continue
        ending = asyncio.create_task(process.wait())
        await asyncio.wait((ending, stopping), return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            await _ended(process, ending)
            return
        pause = 0.0 if time.monotonic() - began >= STAYS else min(MOST_SECONDS, max(0.1, 2 * pause))
        log.warning("worker %d has ended with %d; it is started again", number, ending.result())
        await asyncio.wait((stopping,), timeout=pause)
    stopping.cancel()


async def _started(start: Start) -> Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "deeplink.router.worker", stdin=asyncio.subprocess.PIPE, pass_fds=(start.fd,)
    )
    assert process.stdin is not None
    # One that was killed before it was told anything has closed this end too, which uvloop says with a RuntimeError;
    # that it has ended is seen by whoever waits for it.
    with contextlib.suppress(RuntimeError, ConnectionError):
        process.stdin.write(msgspec.msgpack.encode(start))
        process.stdin.close()
    return process


async def _ended(process: Process, ending: asyncio.Task[int]) -> None:
    if not ending.done():
        process.send_signal(signal.SIGTERM)
        await asyncio.wait((ending,), timeout=SHUTDOWN_SECONDS + MORE_SECONDS)
    if not ending.done():
        process.kill()
        await ending
