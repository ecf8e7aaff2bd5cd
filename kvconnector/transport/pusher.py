"""The end of a one-sided link that writes; what it says meanwhile is in `onesided`."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from deeplink.errors import DeeplinkError, PeerGone, ProtocolError, Refused
from deeplink.kvconnector.transport import talk
from deeplink.kvconnector.transport.arenas import Arenas, Cover
from deeplink.kvconnector.transport.base import Push
from deeplink.kvconnector.transport.library import Flight, Session, pauses
from deeplink.kvconnector.transport.pieces import batches, ranges, read
from deeplink.kvconnector.wires import wire

log = logging.getLogger(__name__)

MOST_BYTES = 64 << 20
"""Of one batch: what cannot be called off, as some libraries copy before they return."""
FAREWELL_SECONDS = 1.0
OUTLIVE_SECONDS = 600.0
OUTLIVE_PAUSE = 0.01


_abandoned: list[object] = []
"""What a library may still use, for as long as this process lives."""


@dataclass(slots=True)
class _Posted:
    """One push, and what it holds: the sources, their registrations, and the flight that may still read them.

    `owed` says that the peer was told of it and waits for its end.
    """

    pushes: list[Push]
    covers: list[Cover] = field(default_factory=list)
    flight: Flight | None = None
    owed: bool = False


class OneSidedLink:
    """Holds on to the sources of a push until nothing of it is under way, even if the push has failed by then."""

    def __init__(self, sock: socket.socket, session: Session, arenas: Arenas, most_pieces: int) -> None:
        self._socket = sock
        self._session = session
        self._arenas = arenas
        self._most_pieces = most_pieces
        self._lock = threading.Lock()
        self._closed = self._broken = False
        self._number = 0
        """Of the push: a Stop may cross with the end of the one that it is for."""
        self._busy = False
        """A push has not ended, or what it posted has not."""

    def push(self, pushes: Sequence[Push], deadline: float) -> None:
        with self._lock:
            if self._closed or self._broken:
                raise PeerGone("the connection is closed")
            self._busy = self._broken = True
        posted = _Posted(list(pushes))
        try:
            self._push(posted, deadline)
        finally:
            if posted.flight is None:
                self._end(posted)
            else:
                name = "deeplink-transport-outlive"
                threading.Thread(target=self._outlive, args=(posted,), name=name, daemon=True).start()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._busy:
                # Wakes whoever waits for an answer. What is owed to the peer can still be said.
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RD)
                return
        self._hang_up()

    def _push(self, posted: _Posted, deadline: float) -> None:
        wanted = read(posted.pushes)
        posted.owed = True
        self._number += 1
        parts = tuple((span.key, span.low, span.high - span.low) for span in wanted.spans)
        talk.send(self._socket, talk.Begin(self._number, parts), deadline)
        sources = wanted.addresses()
        go, stopped = self._await_go(posted, deadline)
        if len(go.bases) != len(parts):
            raise ProtocolError(f"addresses of {len(go.bases)} regions, {len(parts)} were asked for")
        if go.description:
            self._session.meet(go.description)
        todo = wanted.pieces(go.bases, sources)
        for each in ranges(todo):
            posted.covers.append(self._arenas.use(each))
        for batch in batches(todo, MOST_BYTES, self._most_pieces):
            if stopped:
                break
            posted.flight = self._session.write(batch)
            stopped = self._await_flight(posted, posted.flight, deadline)
        self._check_open()
        talk.send(self._socket, talk.Ended(), deadline)
        posted.owed = False
        if stopped:
            raise Refused("the peer has withdrawn a region", field="region")
        self._broken = False

    def _await_go(self, posted: _Posted, deadline: float) -> tuple[talk.Go, bool]:
        """Also whether the peer has said already that nothing may come."""
        stopped = False
        while isinstance(message := talk.receive(self._socket, deadline), talk.Stop):
            stopped = stopped or message.number == self._number
        posted.owed = not isinstance(message, talk.No)
        return talk.check(message, talk.Go), stopped

    def _await_flight(self, posted: _Posted, flight: Flight, deadline: float) -> bool:
        """Until it has landed; whether the peer has said meanwhile that nothing more may come."""
        stopped = False
        for pause in pauses():
            try:
                done = flight.done()
            except DeeplinkError:
                posted.flight = None
                raise
            if done:
                posted.flight = None
            self._check_open()
            wire.remaining(deadline)
            if wire.readable(self._socket, 0):
                message = talk.check(talk.receive(self._socket, deadline), talk.Stop)
                stopped = stopped or message.number == self._number
            if done:
                break
            time.sleep(pause)
        return stopped

    def _check_open(self) -> None:
        if self._closed:
            raise PeerGone("the connection was closed")

    def _outlive(self, posted: _Posted) -> None:
        """The push has failed, but not what it posted: watch that end, and tell the peer."""
        assert posted.flight is not None
        end = time.monotonic() + OUTLIVE_SECONDS
        with contextlib.suppress(DeeplinkError):
            while not posted.flight.done():
                if time.monotonic() > end:
                    log.warning("deeplink: a transfer has not ended for %g s; its memory is kept", OUTLIVE_SECONDS)
                    _abandoned.append((posted, self._session))
                    with self._lock:
                        self._closed = True
                    self._socket.close()
                    return
                time.sleep(OUTLIVE_PAUSE)
        self._end(posted)

    def _end(self, posted: _Posted) -> None:
        for cover in posted.covers:
            self._arenas.leave(cover)
        if posted.owed:
            # The peer does not know that nothing comes any more, and keeps its memory out of use until it does.
            with contextlib.suppress(DeeplinkError):
                talk.send(self._socket, talk.Ended(), time.monotonic() + FAREWELL_SECONDS)
        with self._lock:
            self._busy = False
            if not self._closed:
                return
        self._hang_up()

    def _hang_up(self) -> None:
        self._session.close()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            # A socket that is closed with something unread takes back what it has not yet delivered, such as an Ended.
            self._socket.setblocking(False)
            self._socket.recv(talk.MAX_FRAME)
        self._socket.close()
