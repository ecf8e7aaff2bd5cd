"""Folders that are made once and kept: engine environments, models, overlays.

A folder is whole when its marker is there, and the marker is written last. Who makes a folder holds a lock
beside it, so of two processes that need the same one, the second waits and then finds it made. A folder
without a marker was interrupted: it is wiped and made again. (Made in place rather than moved into place: a
virtual environment has its own path written into its scripts.)
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from deeplink.errors import LocalError

Progress = Callable[[str], None]

MARKER = ".complete"
WAIT_SECONDS = 1800.0
_POLL_SECONDS = 0.2


def root() -> Path:
    """`$XDG_CACHE_HOME/deeplink`, or `~/.cache/deeplink`. Deleting it loses nothing but time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deeplink"


def ensure(folder: Path, make: Callable[[Path], None], progress: Progress, *, wait: float = WAIT_SECONDS) -> Path:
    """`folder`, made by `make(folder)` unless it is whole already.

    `make` gets the path of a folder that does not exist and creates it. What it raises is passed on and the
    folder stays unmarked. Raises LocalError when another process still holds the lock after `wait` seconds.
    """
    if is_whole(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f"{folder.name}.lock"), folder, progress, wait):
        if is_whole(folder):
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        make(folder)
        (folder / MARKER).touch()
    return folder


def is_whole(folder: Path) -> bool:
    return (folder / MARKER).exists()


@contextmanager
def _locked(path: Path, what: Path, progress: Progress, wait: float) -> Iterator[None]:
    """Hold `path` exclusively. The kernel releases it with the process, however that ends."""
    deadline = time.monotonic() + wait
    # Never unlinked: a waiter would then hold the lock of a file that the next one can no longer find.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    told = False
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise LocalError(
                        f"another process has been making {what} for more than {wait:.0f} s",
                        remedy="look for a hanging pip or deeplink process, end it and try again",
                    ) from None
            if not told:
                progress(f"another process is making {what.name}; waiting for it")
                told = True
            time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)
