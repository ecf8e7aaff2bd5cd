"""Connections to peers, kept open between handoffs."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

KEPT_PER_PEER = 4


class _Closable(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=_Closable)


class Pool(Generic[T]):
    """Idle connections by address. One that failed is closed by whoever used it and never comes back here.

    A peer that restarts listens elsewhere, so what is kept for its old address is only ever stale once.
    """

    def __init__(self) -> None:
        self._idle: defaultdict[Hashable, list[T]] = defaultdict(list)
        self._lock = threading.Lock()
        self._closed = False

    def take(self, address: Hashable) -> T | None:
        with self._lock:
            idle = self._idle.get(address)
            return idle.pop() if idle else None

    def give(self, address: Hashable, connection: T) -> None:
        with self._lock:
            if not self._closed and len(self._idle[address]) < KEPT_PER_PEER:
                self._idle[address].append(connection)
                return
        connection.close()

    def drop(self, address: Hashable) -> None:
        """Forget what is kept for a peer that is gone."""
        with self._lock:
            idle = self._idle.pop(address, [])
        for connection in idle:
            connection.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            addresses = list(self._idle)
        for address in addresses:
            self.drop(address)
