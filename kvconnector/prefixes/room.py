"""The folder of a prefix store: how much of it is taken, by all processes that share it, and what goes first.

A file is made in two steps. `reserve` gives it its bytes, under a lock that all processes take, after the least
recently used files have made room; it has no name yet by which anybody would read it. `publish` gives it that name.
Who dies in between leaves a file that nobody reads, and that the next process to look for room removes: each holds a
lock on what it has reserved, which ends with it.

The bytes that are taken are kept in a file. They are never fewer than there are: what is removed is subtracted after
it has gone, and counted again whenever there is no room.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deeplink.errors import ConfigError

LOCK_SECONDS = 5.0
"""How long another process may hold the lock, which takes it milliseconds; after that, nothing is stored."""
SLACK = 10
"""A tenth of the room is made when there is none, so that it is not looked for with every file."""
RESERVED = "reserved"
_POLL = 0.005


@dataclass(frozen=True, slots=True)
class Reserved:
    """A file of the size asked for, which its maker writes and then publishes or abandons; `descriptor` is open."""

    path: Path
    descriptor: int
    size: int


class Room:
    """At most `limit` bytes of files below `folder`. Any number of processes and threads may use one folder."""

    def __init__(self, folder: Path, limit: int) -> None:
        """Raises ConfigError for a folder that others may read or write: prompts can be told from what is in it."""
        self.folder = folder
        self.limit = limit
        self.evicted = 0
        self._mutex = threading.Lock()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.stat()
            if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
                raise ConfigError(
                    f"{folder} is not this user's alone",
                    field="path",
                    ours=f"user {os.geteuid()}, mode 700",
                    theirs=f"user {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}",
                    remedy="name another folder, or give it to the engines' user alone",
                )
            (folder / RESERVED).mkdir(mode=0o700, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._used = os.open(folder / "used", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise ConfigError(f"{folder} cannot be used: {exc}", field="path", ours=str(folder)) from exc
        with self._locked() as held:
            if held:
                self._set(self._count())

    def close(self) -> None:
        os.close(self._lock)
        os.close(self._used)

    def used(self) -> int:
        """Bytes taken, or more."""
        return int.from_bytes(os.pread(self._used, 8, 0), "little")

    def reserve(self, size: int) -> Reserved | None:
        """A file for `size` bytes; None where there is no room, or another process holds the lock for too long."""
        if size > self.limit:
            return None
        with self._locked() as held:
            if not held:
                return None
            if self.used() + size > self.limit:
                self._evict(size)
                if self.used() + size > self.limit:  # others have reserved all of it
                    return None
            path = self.folder / RESERVED / uuid.uuid4().hex
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except OSError:
                return None
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.posix_fallocate(descriptor, 0, size)
            except OSError:
                os.close(descriptor)
                path.unlink(missing_ok=True)
                return None
            self._set(self.used() + size)
            return Reserved(path, descriptor, size)

    def publish(self, reserved: Reserved, path: Path) -> bool:
        """Give the file its name; it is not the maker's any more. False where another has that name, or it cannot be
        given: the file is gone then."""
        try:
            # Unlike a rename, never takes the place of another, whose bytes would then be counted for ever.
            os.link(reserved.path, path)
        except OSError:
            self.abandon(reserved)
            return False
        reserved.path.unlink(missing_ok=True)
        os.close(reserved.descriptor)
        return True

    def abandon(self, reserved: Reserved) -> None:
        reserved.path.unlink(missing_ok=True)
        os.close(reserved.descriptor)
        self._give(reserved.size)

    def remove(self, path: Path) -> None:
        """Remove a published file, if it is there."""
        with self._locked() as held, contextlib.suppress(OSError):
            size = path.stat().st_size
            path.unlink()
            if held:
                self._set(max(0, self.used() - size))

    def _give(self, size: int) -> None:
        with self._locked() as held:
            if held:  # else the bytes are found to be free when they are counted again
                self._set(max(0, self.used() - size))

    def _set(self, used: int) -> None:
        os.pwrite(self._used, used.to_bytes(8, "little"), 0)

    def _evict(self, size: int) -> None:
        """Remove the least recently used files until there is room for `size`, and a little more."""
        used = self._count()
        goal = max(0, self.limit - self.limit // SLACK - size)
        if used + size > self.limit:
            for _, length, path in sorted(self._published()):
                if used <= goal:
                    break
                with contextlib.suppress(OSError):
                    os.unlink(path)
                    used -= length
                    self.evicted += 1
        self._set(used)

    def _count(self) -> int:
        """The bytes of all files, once those are gone whose makers are."""
        used = sum(length for _, length, _ in self._published())
        with os.scandir(self.folder / RESERVED) as found:
            for entry in found:
                with contextlib.suppress(OSError):
                    if _forsaken(entry.path):
                        os.unlink(entry.path)
                    else:
                        used += entry.stat().st_size
        return used

    def _published(self) -> Iterator[tuple[int, int, str]]:
        """When each file was last used, its size and its path."""
        for space in _folders(self.folder):
            if space.name != RESERVED:
                for shelf in _folders(space.path):
                    with os.scandir(shelf.path) as found:
                        for entry in found:
                            with contextlib.suppress(OSError):  # gone in the meantime
                                state = entry.stat()
                                yield state.st_mtime_ns, state.st_size, entry.path

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Whether the lock was had in time."""
        end = time.monotonic() + LOCK_SECONDS
        if not self._mutex.acquire(timeout=LOCK_SECONDS):
            yield False
            return
        try:
            while not (held := _flock(self._lock)) and time.monotonic() < end:
                time.sleep(_POLL)
            try:
                yield held
            finally:
                if held:
                    fcntl.flock(self._lock, fcntl.LOCK_UN)
        finally:
            self._mutex.release()


def _flock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _forsaken(path: str) -> bool:
    """Whether nobody holds the file's lock any more."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return _flock(descriptor)
    finally:
        os.close(descriptor)


def _folders(path: str | Path) -> list[os.DirEntry[str]]:
    with os.scandir(path) as found:
        return [entry for entry in found if entry.is_dir(follow_symlinks=False)]
