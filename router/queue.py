"""Where requests wait, first come first served, while every engine that could take them is full."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from deeplink.errors import Overloaded

T = TypeVar("T")


class Queue:
    """At most `places` wait, each at most `seconds`."""

    def __init__(self, places: int, seconds: float) -> None:
        self._places = places
        self._seconds = seconds
        self.waiting: deque[asyncio.Event] = deque()
        """To be looked at by others, no more."""

    def __len__(self) -> int:
        return len(self.waiting)

    async def turn(self, take: Callable[[], T]) -> T:
        """What `take` returns once it does not raise Overloaded; its other errors pass.

        Between its return and this one's nothing else runs. Raises Overloaded if the queue is full or the time is over.
        """
        if not self.waiting:
            try:
                return take()
            except Overloaded:
                if not self._places:
                    raise
        if len(self.waiting) >= self._places:
            raise Overloaded(f"all engines are full and {len(self.waiting)} requests wait already")
        mine = asyncio.Event()
        self.waiting.append(mine)
        until = time.monotonic() + self._seconds
        try:
            while True:
                try:
                    await asyncio.wait_for(mine.wait(), until - time.monotonic())
                except asyncio.TimeoutError:
                    raise Overloaded(f"all engines were full for {self._seconds:g} s") from None
                mine.clear()
                if self.waiting[0] is mine:
                    try:
                        return take()
                    except Overloaded:
                        continue
        finally:
            self.waiting.remove(mine)
            self.wake()

    def wake(self) -> None:
        """There may be room now: the first that waits tries."""
        if self.waiting:
            self.waiting[0].set()
