"""Memory that a one-sided library has been shown: whole staging arenas, and single pieces for as long as they are used.

Libraries register memory before they move bytes of it, and some refuse what overlaps with what they have. So what lies
within a registered range only uses that once more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deeplink.kvconnector.transport.pieces import Range, address

Register = Callable[[int, int], Any]
Unregister = Callable[[Any], None]


@dataclass(slots=True, eq=False)
class Cover:
    """A registered range that is in use `users` times. `registration` is the library's own handle."""

    start: int
    stop: int
    registration: Any
    users: int = 1


class Arenas:
    """All memory of one transport that its library knows. `version` grows with every range."""

    def __init__(self, register: Register, unregister: Unregister) -> None:
        self._register = register
        self._unregister = unregister
        self._covers: list[Cover] = []
        self._staged: list[memoryview] = []
        self._lock = threading.Lock()
        self.version = 0

    def stage(self, memory: memoryview) -> None:
        """Register an arena until `close`. Raises what the library raises."""
        self.use((address(memory), memory.nbytes))
        self._staged.append(memory)  # lives as long as a peer may write to it

    def use(self, wanted: Range) -> Cover:
        start, length = wanted
        with self._lock:
            for cover in self._covers:
                if cover.start <= start and start + length <= cover.stop:
                    cover.users += 1
                    return cover
            cover = Cover(start, start + length, self._register(start, length))
            self._covers.append(cover)
            self.version += 1
            return cover

    def leave(self, cover: Cover) -> None:
        with self._lock:
            cover.users -= 1
            if not cover.users and cover in self._covers:
                self._covers.remove(cover)
                self._unregister(cover.registration)

    def close(self) -> None:
        with self._lock:
            covers, self._covers = self._covers, []
            for cover in covers:
                self._unregister(cover.registration)
