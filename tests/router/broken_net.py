"""A network that breaks: connections to an address go through it, and are cut, refused or silently stalled."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from urllib.parse import urlsplit


class Net:
    """What goes to `url` leads to `target` while it is `whole`. Use `start` and `stop`."""

    def __init__(self, target: str) -> None:
        self._host, self._port = urlsplit(target).hostname, urlsplit(target).port
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self._refuses = False
        self._server: asyncio.Server | None = None
        self.url = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._met, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5)

    def cut(self) -> None:
        """Every connection ends at once, without a farewell."""
        for writer in tuple(self._writers):
            writer.transport.abort()

    async def fail(self, dice: random.Random) -> None:
        """One fault, for a moment."""
        fault = dice.choice(("cut", "refuse", "stall"))
        if fault == "stall":
            self._flows.clear()
        else:
            self._refuses = fault == "refuse"
            self.cut()
        await asyncio.sleep(dice.uniform(0.02, 0.2))
        self._refuses = False
        self._flows.set()

    async def _met(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses:
            writer.transport.abort()
            return
        try:
            theirs, ours = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, ours}
        for source, sink in ((reader, ours), (theirs, writer)):
            task = asyncio.create_task(self._pass(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError):
                while data := await source.read(1 << 16):
                    await self._flows.wait()
                    sink.write(data)
                    await sink.drain()
        finally:
            sink.close()
            self._writers.discard(sink)
