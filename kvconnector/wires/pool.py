"""Connections to peers, kept open between handoffs."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

KEPT_PER_PEER = 4
KEPT_PEERS = 256
"""Addresses for which connections are kept; the one that was used longest ago goes first."""


class _Closable(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=_Closable)


class Pool(Generic[T]):
    """Idle connections by address. One that failed is closed by whoever used it and never comes back here.

    A peer that restarts listens elsewhere, so what is kept for its old address is only ever stale once; and nobody asks
    for it again, so there is an end to how much is kept.
    """

    def __init__(self) -> None:
        self._idle: dict[Hashable, list[T]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def take(self, address: Hashable) -> T | None:
        with self._lock:
            idle = self._idle.pop(address, [])
            taken = idle.pop() if idle else None
            if idle:
                self._idle[address] = idle
            return taken

    def give(self, address: Hashable, connection: T) -> None:
        with self._lock:
            idle = self._idle.pop(address, [])
            spare = [connection]
            if not self._closed and len(idle) < KEPT_PER_PEER:
                idle.append(spare.pop())
            if idle:
                self._idle[address] = idle  # again at the end: the first one is the one used longest ago
            if len(self._idle) > KEPT_PEERS:
                spare += self._idle.pop(next(iter(self._idle)))
        for connection in spare:
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
