"""A one-sided library that does what no real one can be made to do; both ends are in one process."""

from __future__ import annotations

import ctypes
import threading

from deeplink.errors import HandoffError, PeerGone
from deeplink.kvconnector.transport.base import Capabilities
from deeplink.kvconnector.transport.library import Flight, Session
from deeplink.kvconnector.transport.onesided import OneSided
from deeplink.kvconnector.transport.pieces import Pieces

SECRET = b"a secret for tests only, 32 byte"


class Copier:
    """Both ends are this process, so it copies. What it has posted lands when `landing` is set."""

    most_pieces = 4

    def __init__(self) -> None:
        self.landing = threading.Event()
        self.landing.set()
        self.broken = ""
        self.refusing = False
        self.batches: list[Pieces] = []
        self.registered = 0
        self.closed = 0

    def register(self, start: int, length: int) -> object:
        self.registered += 1
        return start

    def unregister(self, registration: object) -> None:
        self.registered -= 1

    def session(self, *, serving: bool) -> Session:
        return CopierSession(self)

    def close(self) -> None:
        self.closed += 1


class CopierSession:
    def __init__(self, library: Copier) -> None:
        self.library = library

    def describe(self) -> bytes:
        return b"a copier"

    def meet(self, theirs: bytes) -> None:
        assert theirs == b"a copier"

    def write(self, pieces: Pieces) -> Flight:
        if self.library.refusing:
            raise HandoffError("it does not write")
        self.library.batches.append(pieces)
        return CopierFlight(self.library, pieces)

    def progress(self) -> None:
        pass

    def close(self) -> None:
        pass


class CopierFlight:
    def __init__(self, library: Copier, pieces: Pieces) -> None:
        self.library = library
        self.pieces = pieces

    def done(self) -> bool:
        if self.library.broken:
            raise PeerGone(self.library.broken)
        if not self.library.landing.is_set():
            return False
        every = zip(self.pieces.source.tolist(), self.pieces.target.tolist(), self.pieces.length.tolist(), strict=True)
        for source, target, length in every:
            ctypes.memmove(target, source, length)
        return True


class CopierTransport(OneSided):
    name = "copier"
    capabilities = Capabilities(frozenset({"dram"}), True, False, revocable=False)

    def __init__(self) -> None:
        self.library = Copier()
        super().__init__("127.0.0.1", SECRET, self.library)
