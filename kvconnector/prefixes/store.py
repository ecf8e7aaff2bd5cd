"""Prefixes in files of one folder, which any number of engines on one host share.

A file holds one unit of tokens in wire form, ``[layer, kv, head, token, dim]``, whatever the page size and the layout
of who wrote it. Before the elements stand what they are: the space, the name, their number of bytes and their digest
(`deeplink.kvconnector.relayout.digest`). A reader has what all of that says, or a miss: what is not as it says is
removed, and counted as corrupted. Files appear whole or not at all (`deeplink.kvconnector.prefixes.room`).

The folder belongs to one user, and who can write to it is trusted: digests find corruption, not forgery.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deeplink.errors import ProtocolError
from deeplink.kvconnector.prefixes import space as prefix_space
from deeplink.kvconnector.prefixes.names import DIGEST
from deeplink.kvconnector.prefixes.room import Reserved, Room
from deeplink.kvconnector.prefixes.space import Space
from deeplink.kvconnector.relayout import digest
from deeplink.kvconnector.relayout.convert import storage_dtype
from deeplink.kvconnector.relayout.plan import Chunk

MAGIC = b"DLPREFIX"
_HEAD = struct.Struct(f"<8s16s{DIGEST}sQQ")
"""Magic, key of the space, name, bytes of elements, digest."""
SPACE = "space.json"

Elements = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Counts:
    """Units since this process opened the store. `written` counts those this process has stored, `kept` those that were
    there when it wanted to, and `unstored` those for which there was no room or no way; `hits` were read and verified,
    `misses` were not there, and `corrupted` were not what they said."""

    written: int = 0
    kept: int = 0
    unstored: int = 0
    hits: int = 0
    misses: int = 0
    corrupted: int = 0
    evicted: int = 0


class Store:
    """The entries of one space. Any thread may call any method."""

    def __init__(self, folder: Path, limit: int, space: Space) -> None:
        """`limit` is in bytes, of all spaces in the folder together. Raises ConfigError for a folder that cannot be
        used."""
        self.space = space
        self.dtype = storage_dtype(space.dtype)
        self._room = Room(folder, limit)
        self._folder = folder / space.key
        self._folder.mkdir(mode=0o700, exist_ok=True)
        (self._folder / SPACE).write_bytes(prefix_space.encode(space))
        self._counts = Counts()
        self._lock = threading.Lock()

    def close(self) -> None:
        self._room.close()

    def counts(self) -> Counts:
        with self._lock:
            return replace(self._counts, evicted=self._room.evicted)

    def used(self) -> int:
        """Bytes taken by all spaces of the folder."""
        return self._room.used()

    def others(self) -> list[Space]:
        """The other spaces of this folder, whose entries are never read here."""
        found = []
        for path in sorted(self._folder.parent.glob(f"*/{SPACE}")):
            with contextlib.suppress(OSError, ProtocolError):
                with path.open("rb") as file:
                    space = prefix_space.decode(file.read(prefix_space.MAX_BYTES))
                if space != self.space:
                    found.append(space)
        return found

    def has(self, name: str) -> bool:
        return self._path(name).exists()

    def keep(self, name: str) -> bool:
        """Whether a unit is there, which then counts as one that need not be stored."""
        there = self.has(name)
        if there:
            self._count(kept=1)
        return there

    def put(self, name: str, wire_LSHTD: Elements) -> bool:
        """Store one unit; whether it is there now. The elements are dense, and stay the caller's."""
        value = self.digest(wire_LSHTD)
        reserved = self._room.reserve(_HEAD.size + wire_LSHTD.nbytes)
        if reserved is None:
            self._count(unstored=1)
            return False
        head = _HEAD.pack(MAGIC, bytes.fromhex(self.space.key), bytes.fromhex(name), wire_LSHTD.nbytes, value)
        if self._write(reserved, head, _bytes(wire_LSHTD), name):
            self._count(written=1)
        elif not self.keep(name):  # nor was another faster
            self._count(unstored=1)
            return False
        return True

    def get(self, name: str, wire_LSHTD: Elements) -> bool:
        """Read one unit into dense elements of `space.shape`; False for a miss, whatever is in them then."""
        try:
            descriptor = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._count(misses=1)
            return False
        try:
            good = self._read(descriptor, name, wire_LSHTD)
            if good:
                os.utime(descriptor)
        except OSError:
            good = False
        finally:
            os.close(descriptor)
        if good:
            self._count(hits=1)
        else:
            self._room.remove(self._path(name))
            self._count(corrupted=1)
        return good

    def clear(self) -> None:
        """Remove all entries of this space."""
        for path in self._folder.glob("*/*"):
            self._room.remove(path)

    def digest(self, wire_LSHTD: Elements) -> int:
        """Of one unit: what its entry states."""
        return int(digest.tiles(Chunk(0, self.space.unit), wire_LSHTD).sum(dtype=np.uint64))

    def _read(self, descriptor: int, name: str, wire_LSHTD: Elements) -> bool:
        head = bytearray(_HEAD.size)
        length = _fill(descriptor, [head, _bytes(wire_LSHTD), bytearray(1)])
        if length != _HEAD.size + wire_LSHTD.nbytes:  # more, or less
            return False
        magic, space, named, size, value = _HEAD.unpack(head)
        stated = (magic, space.hex(), named.hex(), size)
        return stated == (MAGIC, self.space.key, name, wire_LSHTD.nbytes) and value == self.digest(wire_LSHTD)

    def _write(self, reserved: Reserved, head: bytes, elements: memoryview, name: str) -> bool:
        path = self._path(name)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            done = os.pwrite(reserved.descriptor, head, 0)
            while done < reserved.size:
                done += os.pwrite(reserved.descriptor, elements[done - len(head) :], done)
        except OSError:
            self._room.abandon(reserved)
            return False
        return self._room.publish(reserved, path)

    def _path(self, name: str) -> Path:
        return self._folder / name[:2] / name

    def _count(self, **more: int) -> None:
        with self._lock:
            self._counts = replace(
                self._counts, **{field: getattr(self._counts, field) + count for field, count in more.items()}
            )


def _bytes(wire_LSHTD: Elements) -> memoryview:
    return wire_LSHTD.view(np.uint8).reshape(-1).data


def _fill(descriptor: int, views: list[Any]) -> int:
    """Read into the views, in order, until they are full or the file ends; how many bytes there were."""
    left = [memoryview(view) for view in views]
    done = 0
    while left:
        count = os.preadv(descriptor, left, done)
        if not count:
            break
        done += count
        while left and count >= left[0].nbytes:
            count -= left.pop(0).nbytes
        if left and count:
            left[0] = left[0][count:]
    return done
