"""Streams as a device has them, over tensors in host memory: work that is put on a stream is done late.

A stream does what is on it when something has to wait for it: a copy on the same stream, an event, `synchronize`. What
forgets to wait therefore copies the bytes of before, or has its own overwritten, every time and not once a month.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from deeplink.kvconnector.relayout import device


class Stream:
    def __init__(self, device: Any = None) -> None:
        self._work: list[Callable[[], None]] = []
        self.done = 0
        self._lock = threading.RLock()

    def put(self, work: Callable[[], None]) -> None:
        self._work.append(work)

    @property
    def length(self) -> int:
        return len(self._work)

    def until(self, length: int) -> None:
        with self._lock:
            while self.done < length:
                self._work[self.done]()
                self.done += 1

    def synchronize(self) -> None:
        self.until(self.length)


class Event:
    def record(self, stream: Stream) -> None:
        self._stream, self._length = stream, stream.length

    def wait(self, stream: Stream) -> None:
        # A copy on this stream is done at once, so what it waits for must be too.
        self._stream.until(self._length)


class Streams:
    """In the place of torch.cuda. Each thread has a current stream; the first is that of threads without one."""

    Event, Stream = Event, Stream

    def __init__(self) -> None:
        self._local = threading.local()
        self._first = Stream()

    def current_stream(self, device: Any = None) -> Stream:
        return getattr(self._local, "stream", self._first)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream()
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before


@contextlib.contextmanager
def installed() -> Iterator[Streams]:
    """While this is entered, torch's CPU tensors are taken for those of a device with streams."""
    streams = Streams()
    assign, host, runtime = device.relayout, device.HOST, device.runtime

    def in_order(*arguments: Any) -> None:
        streams.current_stream().synchronize()
        assign(*arguments)

    device.relayout, device.HOST, device.runtime = in_order, (), lambda _: streams
    device._side.cache_clear()
    try:
        yield streams
    finally:
        device.relayout, device.HOST, device.runtime = assign, host, runtime
        device._side.cache_clear()
