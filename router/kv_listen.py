"""Listening to the cache events of engines, over ZeroMQ. Needs `pip install 'deeplink[events]'`.

One subscription for each engine that has an address for it. A gap is filled by what the engine keeps for replay, within
REPLAY_SECONDS; what arrives meanwhile waits. Everything that is received is bounded, and an engine that sends something
else is doubted, never believed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from deeplink.errors import ConfigError, ProtocolError
from deeplink.router import kv_events
from deeplink.router.engine import Engine
from deeplink.router.kv_index import Index
from deeplink.router.kv_sequence import Sequence, number_of

REPLAY_SECONDS = 2.0
WAITING = 10_000
"""Batches that may wait in ZeroMQ for one engine; the oldest go first, which shows as a gap."""

log = logging.getLogger(__name__)


def library() -> Any:
    """`zmq`, with its asyncio. Raises ConfigError."""
    try:
        import zmq.asyncio
    except ImportError as exc:
        raise ConfigError(
            "engines have addresses for cache events, but pyzmq is not installed",
            field="engines[].events",
            remedy="pip install 'deeplink[events]'",
        ) from exc
    return zmq


class Listeners:
    """Subscriptions to the engines that have an address. Made in a running loop; `close` it."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._tasks: dict[str, tuple[tuple[str, str], asyncio.Task[None]]] = {}
        self._down: set[str] = set()
        self._context: Any = None

    def set(self, engines: tuple[Engine, ...]) -> None:
        """These engines are listened to from now on, and no others. Raises ConfigError without pyzmq."""
        wanted = {engine.name: (engine.events, engine.replay) for engine in engines if engine.events}
        down = {engine.name for engine in engines if engine.down}
        for name in [name for name, (where, _) in self._tasks.items() if wanted.get(name) != where]:
            self._tasks.pop(name)[1].cancel()
            self._index.leave(name)
        for name in down & self._tasks.keys() - self._down:
            self._index.doubt(name, "it does not answer")
        for name in self._down - down & self._tasks.keys():
            if self._index.why(name):  # it may be another one, and this one says from its beginning on what it holds
                self._tasks.pop(name)[1].cancel()
        self._down = down & wanted.keys()
        for name, where in wanted.items():
            if name not in self._tasks:
                if self._context is None:
                    self._context = library().asyncio.Context()
                self._index.follow(name)
                self._tasks[name] = where, asyncio.create_task(self._listen(name, *where))

    async def close(self) -> None:
        tasks = [task for _, task in self._tasks.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=REPLAY_SECONDS)
        if self._context is not None:
            self._context.destroy(linger=0)

    def _socket(self, kind: int, where: str) -> Any:
        zmq = library()
        socket = self._context.socket(kind)
        socket.set(zmq.MAXMSGSIZE, kv_events.MAX_BATCH)
        socket.set(zmq.RCVHWM, WAITING)
        socket.set(zmq.LINGER, 0)
        socket.connect(where)
        return socket

    async def _listen(self, name: str, events: str, replay: str) -> None:
        """Until it is cancelled, or the addresses turn out to be none."""
        zmq = library()
        try:
            await self._heard(name, events, replay)
        except zmq.ZMQError as exc:
            log.error("cache events of engine %s cannot be heard at %s: %s", name, events, exc)
            self._index.doubt(name, f"its events cannot be heard: {exc}")

    async def _heard(self, name: str, events: str, replay: str) -> None:
        zmq = library()
        sequence = Sequence(name, self._index)
        socket = self._socket(zmq.SUB, events)
        socket.set(zmq.SUBSCRIBE, b"")
        try:
            await self._fill(sequence, 0, replay)
            while True:
                frames = await socket.recv_multipart()
                try:
                    number, data = _batch(frames)
                except ProtocolError as exc:
                    sequence.lost(exc.message)
                    continue
                missing = sequence.arrived(number, data)
                if missing is not None:
                    await self._fill(sequence, missing, replay)
        finally:
            socket.close(linger=0)

    async def _fill(self, sequence: Sequence, start: int, replay: str) -> None:
        """Leaves no batch waiting."""
        if replay:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._replay(sequence, start, replay), REPLAY_SECONDS)
        if sequence.held:
            log.warning("cache events of engine %s from %d on are missing", sequence.name, start)
            sequence.skip()

    async def _replay(self, sequence: Sequence, start: int, replay: str) -> None:
        zmq = library()
        socket = self._socket(zmq.DEALER, replay)
        try:
            # As a REQ socket would: an empty frame first, which the other side gives back.
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            while True:
                frames = await socket.recv_multipart()
                try:
                    number, data = _batch(frames)
                except ProtocolError:
                    return
                if number < 0:
                    if start == 0 and sequence.next is None and not sequence.held:
                        sequence.empty()
                    return
                if number >= start:
                    sequence.arrived(number, data)
        finally:
            socket.close(linger=0)


def _batch(frames: list[bytes]) -> tuple[int, bytes]:
    """The last two frames are the number and the batch; before them are the topic, and in a replay an empty one."""
    if not 2 <= len(frames) <= 4:
        raise ProtocolError("a message of cache events has not three frames", field="frames", theirs=str(len(frames)))
    return number_of(frames[-2]), frames[-1]
