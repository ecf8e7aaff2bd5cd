"""Between an engine's pages and a prefix store: a page is whole units, each of which is one entry."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deeplink.errors import LayoutError
from deeplink.kvconnector.caches.cache import Cache
from deeplink.kvconnector.prefixes.names import PageName, check_sizes
from deeplink.kvconnector.prefixes.store import Store
from deeplink.kvconnector.relayout.plan import Chunk


class Pages:
    """The pages of one cache, in host memory, and the store that they are written to and read from. Any thread may call
    any method; the pages it names are the caller's meanwhile."""

    def __init__(self, cache: Cache, store: Store) -> None:
        """Raises ConfigError for pages that are not whole units, LayoutError for a cache of another space."""
        self.store = store
        self._cache = cache
        self._unit = store.space.unit
        check_sizes(cache.bound.block_size, self._unit)
        if cache.wire_shape(self._unit) != store.space.shape or cache.dtype != store.dtype:
            raise LayoutError(
                "the cache is not what its space says",
                field="shape",
                ours=f"{cache.wire_shape(self._unit)} of {cache.dtype}",
                theirs=f"{store.space.shape} of {store.dtype}",
            )
        self._local = threading.local()

    def present(self, names: Sequence[str]) -> int:
        """How many pages from the first on are stored, as far as their names tell."""
        for count, name in enumerate(names):
            units = _units(name)
            if not units or not all(map(self.store.has, reversed(units))):
                return count
        return len(names)

    def write(self, names: Sequence[str], blocks: Sequence[int]) -> list[bool]:
        """Store the pages that lie in `blocks`; of each, whether all of it is stored now."""
        return [self._write(name, block) for name, block in zip(names, blocks, strict=True)]

    def read(self, names: Sequence[str], blocks: Sequence[int]) -> list[bool]:
        """Read the pages into `blocks`; of each, whether it is there and verified. After one that is not, those that
        follow are not read either: without it they are of no use. A block whose page is not there holds anything."""
        found = [False] * len(names)
        for place, (name, block) in enumerate(zip(names, blocks, strict=True)):
            found[place] = self._read(name, block)
            if not found[place]:
                break
        return found

    def digest(self, names: Sequence[str], blocks: Sequence[int]) -> int:
        """The sum of the digests of all units that lie in `blocks` now, modulo 2^64."""
        total = 0
        for name, block in zip(names, blocks, strict=True):
            for chunk, _ in self._chunks(_units(name)):
                total += self.store.digest(self._gather(block, chunk))
        return total % (1 << 64)

    def _write(self, name: str, block: int) -> bool:
        units = _units(name)
        stored = bool(units)
        for chunk, unit in self._chunks(units):
            # What is there already need not be gathered.
            stored = (self.store.keep(unit) or self.store.put(unit, self._gather(block, chunk))) and stored
        return stored

    def _read(self, name: str, block: int) -> bool:
        units = _units(name)
        for chunk, unit in self._chunks(units):
            wire = self._wire()
            if not self.store.get(unit, wire):
                return False
            self._cache.scatter(wire, chunk.start, [block], chunk)
        return bool(units)

    def _gather(self, block: int, chunk: Chunk) -> npt.NDArray[Any]:
        wire = self._wire()
        self._cache.gather([block], chunk, wire)
        return wire

    def _chunks(self, units: Sequence[str]) -> list[tuple[Chunk, str]]:
        return [(Chunk(at * self._unit, (at + 1) * self._unit), unit) for at, unit in enumerate(units)]

    def _wire(self) -> npt.NDArray[Any]:
        """One for each thread, which it uses again and again."""
        wire: npt.NDArray[Any] | None = getattr(self._local, "wire", None)
        if wire is None:
            wire = self._local.wire = np.empty(self.store.space.shape, self.store.dtype)
        return wire


def _units(name: str) -> tuple[str, ...]:
    """None for a name that was not made by `deeplink.kvconnector.prefixes.names`: such a page is neither stored nor
    found."""
    return name.units if isinstance(name, PageName) else ()
