"""What a one-sided library must do to become a transport: see `onesided`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from deeplink.kvconnector.transport.pieces import Pieces

FIRST_PAUSE, LONGEST_PAUSE = 20e-6, 1e-3
"""Seconds."""


def pauses() -> Iterator[float]:
    """Between looks at something that usually takes microseconds, and that nobody may spin for when it does not."""
    pause = FIRST_PAUSE
    while True:
        yield pause
        pause = min(2 * pause, LONGEST_PAUSE)


class Flight(Protocol):
    """Writes that were posted."""

    def done(self) -> bool:
        """Whether all of it is in the peer's memory. Raises PeerGone or HandoffError when that will never be.

        After it was true or has raised, nothing of it is under way, and it is not asked again.
        """


class Session(Protocol):
    """One connection between two processes' libraries, seen from one end. Its calls come from one thread at a time."""

    def describe(self) -> bytes:
        """What the other end needs to `meet` this one; again whenever memory was registered."""

    def meet(self, theirs: bytes) -> None: ...

    def write(self, pieces: Pieces) -> Flight:
        """Post a batch. Raises PeerGone or HandoffError."""

    def progress(self) -> None:
        """Called again and again at the end that is written to, for libraries without threads of their own."""

    def close(self) -> None: ...


class Library(Protocol):
    """A one-sided library in this process. Safe to use from several threads."""

    most_pieces: int
    """In one batch."""

    def register(self, start: int, length: int) -> object: ...

    def unregister(self, registration: object) -> None: ...

    def session(self, *, serving: bool) -> Session:
        """For the end that owns the memory, or the one that writes."""

    def close(self) -> None:
        """All that was registered is unregistered by now. Later calls of anything do nothing or raise PeerGone."""
