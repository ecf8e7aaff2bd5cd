"""One of several processes that serve on one port. What they must know together is another process's (`owner`).

Started by that one, with what it has to know on its standard input. It ends when it is told to, or when the owner has.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from functools import partial

import msgspec

from deeplink import config as configs
from deeplink.config import Config
from deeplink.errors import ConfigError, NoEngine, PluginError
from deeplink.plugins import load_plugins
from deeplink.router import inner, logs
from deeplink.router.api import Api, failed, told
from deeplink.router.borrowed import BorrowedAdmission, BorrowedFleet, BorrowedMetrics, BorrowedRecent, Owner
from deeplink.router.client import Client
from deeplink.router.clients import Clients
from deeplink.router.control import Control
from deeplink.router.flow import Flow
from deeplink.router.head import Head
from deeplink.router.keys import Keys
from deeplink.router.serve import SHUTDOWN_SECONDS, load_tls, loop_runner, spare_the_collector
from deeplink.router.tracing import Spans
from deeplink.router.upstream import Upstream

OWNER, LIBRARY = "owner", "library"
"""The sockets in the owner's folder: for what `speech` is spoken, and for what the HTTP library serves there."""
FIRST_SECONDS = 10.0
"""For the owner to say which engines there are."""
PIECE = 64 << 10
UNREACHED = "the process that knows the engines cannot be reached"

log = logging.getLogger(__name__)


class Start(msgspec.Struct, frozen=True):
    """What a worker is told when it starts: the configuration as `written`, the secret, which keys clients need (their
    digests, None if none are needed: those in the file now may be others), and where the owner's sockets are. `fd` is
    the socket on which clients arrive, which it has inherited."""

    config: bytes
    secret: bytes
    keys: tuple[bytes, ...] | None
    folder: str
    fd: int


def written(config: Config) -> bytes:
    """As `read` reads it. Not JSON, in which a limit cannot be infinite."""
    return msgspec.msgpack.encode(config.model_dump(), enc_hook=str)


def read(config: bytes) -> Config:
    return configs.parse(msgspec.msgpack.decode(config), "the owner's configuration")


def main() -> None:
    start = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Start)
    logs.to_stderr()
    try:
        loop_runner()(serve(start))
    except (ConfigError, NoEngine, PluginError) as exc:
        log.error("%s", exc)
        raise SystemExit(1) from exc


async def serve(start: Start) -> None:
    """Until SIGTERM, or until the owner has ended. Raises NoEngine if it cannot be reached, ConfigError for a
    certificate that cannot be used any more."""
    config, secret, folder = read(start.config), start.secret, start.folder
    section, loop, stop = config.router, asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    for number in (signal.SIGINT, signal.SIGHUP):  # the owner's to hear
        signal.signal(number, signal.SIG_IGN)
    plugins, context = load_plugins(), load_tls(section.tls)
    owner = Owner()
    try:
        await loop.create_unix_connection(lambda: owner.line, os.path.join(folder, OWNER))
    except OSError as exc:
        raise NoEngine(UNREACHED) from exc
    control, upstream = Control(secret), Upstream()
    spans = Spans() if section.tracing else None
    fleet = BorrowedFleet(owner, control, plugins.kinds)
    admission = BorrowedAdmission(owner, fleet, section, plugins.policies)
    flow = Flow(fleet, admission, upstream, control, secret, section)
    keys = None if start.keys is None else Keys.of(start.keys)
    api = Api(section, keys, fleet, flow, upstream, BorrowedMetrics(owner), BorrowedRecent(owner), spans)
    api.library = partial(_forward, os.path.join(folder, LIBRARY))
    clients = Clients(api, section.max_connections, section.header_seconds)
    try:
        if not await _either(owner.said, owner.over, FIRST_SECONDS) or owner.over.is_set():
            raise NoEngine(UNREACHED)
        server = await loop.create_server(
            lambda: Client(clients, loop),
            sock=socket.socket(fileno=start.fd),
            ssl=context,
            ssl_handshake_timeout=section.header_seconds if context else None,
        )
        spare_the_collector()
        await _either(stop, owner.over)
        server.close()
    finally:
        await clients.close(SHUTDOWN_SECONDS)
        await fleet.close()
        owner.line.close()
        await control.close()
        await upstream.close()
        if spans is not None:
            await asyncio.to_thread(spans.close)


async def _either(one: asyncio.Event, other: asyncio.Event, seconds: float | None = None) -> bool:
    """Whether one of the two has happened in time."""
    ends = [asyncio.create_task(event.wait()) for event in (one, other)]
    done, _ = await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for end in ends:
        end.cancel()
    return bool(done)


class _Reading:
    """An answer that the owner writes, read no faster than the client reads it."""

    def __init__(self) -> None:
        self.free = asyncio.Event()
        self.free.set()

    def pause(self) -> None:
        self.free.clear()

    def resume(self) -> None:
        self.free.set()


async def _forward(path: str, head: Head, body: bytes, client: Client) -> None:
    """Health, metrics, the page and the operators' API are the owner's to answer, whichever worker is asked."""
    try:
        reader, writer = await asyncio.open_unix_connection(path)
    except OSError:
        client.answer(*told(*failed(NoEngine(UNREACHED), [])))
        return
    try:
        writer.write(inner.written(head, body))
        reading = _Reading()
        while data := await reader.read(PIECE):
            client.raw(data, reading)
            await reading.free.wait()
    except OSError:
        log.info("the owner has ended in the middle of an answer")
    finally:
        writer.close()


if __name__ == "__main__":
    main()
