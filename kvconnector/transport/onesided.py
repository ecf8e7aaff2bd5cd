"""Pushes by a library that writes into a peer's registered memory by itself: NIXL, Mooncake, DLSlime.

Such a library knows addresses, not regions, and its peer neither checks nor notices what comes. So everything that
needs a conversation goes over a socket of ours, which authenticates:

    pusher -> owner   Hello  Begin              Ended        owner: whose memory it is
    owner -> pusher   Hello       Go | No  Stop

The Hellos carry how the two libraries find each other; no name service is needed. `Begin` names the regions and bounds
of one push, which the owner checks; `Go` has their addresses.

Withdrawing sends `Stop` and waits for `Ended`. A pusher that is frozen, killed or cut off does not send it, and what
it has posted may still be written, today or when it wakes: then `withdraw` raises, and the memory stays out of use. A
pusher whose deadline passes goes on watching what it has posted, and says `Ended` once that has ended.

This holds against mistakes and faults, not against an attacker: whoever reaches the library's own ports, past us, is
not asked for the secret. Hence `trust = "fabric"`.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import weakref

from deeplink.errors import DeadlineExceeded, DeeplinkError, Refused
from deeplink.kvconnector.transport import talk
from deeplink.kvconnector.transport.arena import Lent
from deeplink.kvconnector.transport.arenas import Arenas, Cover
from deeplink.kvconnector.transport.base import Capabilities, Link, Region
from deeplink.kvconnector.transport.library import Library, Session, pauses
from deeplink.kvconnector.transport.pieces import address
from deeplink.kvconnector.transport.pusher import OneSidedLink
from deeplink.kvconnector.transport.regions import Regions
from deeplink.kvconnector.wires import greeting, wire
from deeplink.kvconnector.wires.listener import Listener

IDLE_SECONDS = 24 * 3600.0
STOP_SECONDS = 2.0
"""How long a pusher that is told to stop may take; what it has posted is a batch at most."""
FIRST_SECONDS = 10.0
HURRY_SECONDS, LAZY_PAUSE = 10.0, 0.02
"""A push that takes longer than the first is progressed in steps of the second: it is slow anyhow, or frozen."""


class OneSided:
    """The transport, given a library. Subclasses name themselves and open theirs."""

    name: str
    capabilities: Capabilities

    def __init__(self, host: str, secret: bytes, library: Library) -> None:
        self._secret = secret
        self._library = library
        self._purpose = f"transport-{self.name}"
        self._arenas = Arenas(library.register, library.unregister)
        self._kept: set[_Registered] = set()
        self._regions = Regions(let_go=STOP_SECONDS, one_sided=True)
        # Also at the interpreter's exit, as libraries crash when that comes upon them.
        self._tear_down = weakref.finalize(self, _tear_down, self._arenas, library)
        try:
            self._listener = Listener(host, secret, self._purpose, self._serve)
        except OSError:
            self._tear_down()
            raise

    @property
    def address(self) -> str:
        return self._listener.address

    def stage(self, memory: memoryview) -> None:
        self._arenas.stage(memory)

    def register(self, memory: memoryview) -> Region:
        memory = memory.cast("B")
        cover = self._arenas.use((address(memory), memory.nbytes)) if memory else None
        return _Registered(self._regions.register(memory), cover, self._arenas, self._kept)

    def connect(self, address: str, deadline: float) -> Link:
        sock = wire.connect(address, deadline)
        session: Session | None = None
        try:
            greeting.greet(sock, self._secret, self._purpose, server=False, deadline=deadline)
            session = self._library.session(serving=False)
            talk.send(sock, talk.Hello(session.describe()), deadline)
            session.meet(talk.expect(sock, talk.Hello, deadline).description)
        except DeeplinkError:
            sock.close()
            if session is not None:
                session.close()
            raise
        return OneSidedLink(sock, session, self._arenas, self._library.most_pieces)

    def close(self) -> None:
        self._listener.close()
        self._tear_down()

    def _serve(self, sock: socket.socket) -> None:
        session = self._library.session(serving=True)
        try:
            session.meet(talk.expect(sock, talk.Hello, time.monotonic() + FIRST_SECONDS).description)
            version = self._arenas.version
            talk.send(sock, talk.Hello(session.describe()), time.monotonic() + FIRST_SECONDS)
            while True:
                begin = talk.expect(sock, talk.Begin, time.monotonic() + IDLE_SECONDS)
                before, version = version, self._arenas.version
                self._serve_push(sock, session, begin, b"" if version == before else session.describe())
        finally:
            session.close()

    def _serve_push(self, sock: socket.socket, session: Session, begin: talk.Begin, news: bytes) -> None:
        sending = threading.Lock()

        def stop() -> None:
            with sending, contextlib.suppress(DeeplinkError):
                talk.send(sock, talk.Stop(begin.number), time.monotonic() + STOP_SECONDS)

        try:
            with self._regions.writing(begin.parts, stop) as views:
                bases = tuple(
                    address(view) - low if view else 0 for view, (_, low, _) in zip(views, begin.parts, strict=True)
                )
                with sending:
                    talk.send(sock, talk.Go(bases, news), time.monotonic() + FIRST_SECONDS)
                began = time.monotonic()
                for pause in pauses():
                    waited = time.monotonic() - began
                    if wire.readable(sock, pause if waited < HURRY_SECONDS else LAZY_PAUSE):
                        break
                    session.progress()
                    wire.remaining(began + IDLE_SECONDS)
                talk.expect(sock, talk.Ended, time.monotonic() + FIRST_SECONDS)
        except Refused as exc:
            talk.send(sock, talk.No(exc.message), time.monotonic() + FIRST_SECONDS)


def _tear_down(arenas: Arenas, library: Library) -> None:
    arenas.close()
    library.close()


class _Registered:
    """A region, and the library's registration of its memory for as long as a peer may write there.

    While that is not known to have ended, `kept` holds on to it, so that the memory is not freed under a writer.
    """

    lent: Lent | None = None

    def __init__(self, region: Region, cover: Cover | None, arenas: Arenas, kept: set[_Registered]) -> None:
        self._region = region
        self._cover = cover
        self._arenas = arenas
        self._kept = kept

    @property
    def key(self) -> bytes:
        return self._region.key

    def withdraw(self) -> None:
        try:
            self._region.withdraw()
        except DeadlineExceeded:
            self._kept.add(self)
            raise
        self._kept.discard(self)
        cover, self._cover = self._cover, None
        if cover is not None:
            self._arenas.leave(cover)
