"""Watching the prefills of claims that are still to be made, so that an engine reserves nothing for them too early.

A claim may be asked of a decode engine before prefill has begun. What it reserves for the cache that comes it cannot
give to others, so it waits with that until something is there to fetch. This is only about when to claim: a producer
that is not there any more, or does not let itself be watched, makes its claims due, and they find out what there is.
One that is silent (frozen, or cut off) is asked again until the deadline.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from deeplink.errors import DeadlineExceeded, DeeplinkError, PeerGone, ProtocolError
from deeplink.kvconnector.handoffs import channel as ch
from deeplink.kvconnector.handoffs.handoff import COMPLETE, NOT_BEGUN
from deeplink.kvconnector.handoffs.ticket import Ticket
from deeplink.kvconnector.wires.tls import Tls

log = logging.getLogger(__name__)

SECONDS = 2.0
"""For a producer to be connected, and for its answer."""
RETRY_SECONDS = 0.2


@dataclass(slots=True)
class _Watched:
    stage: int = NOT_BEGUN


@dataclass(slots=True)
class _Source:
    """The handoffs of the producer that is reached at one address, and whether a thread looks after them."""

    handoffs: dict[str, _Watched] = field(default_factory=dict)
    looked_after: bool = False


class Watching:
    """All that this process watches, with one thread for each producer it waits for. Any thread may call. `on_news` is
    called in those threads when something has gone further."""

    def __init__(self, secret: bytes, tls: Tls | None = None, on_news: Callable[[], None] | None = None) -> None:
        self._secret = secret
        self._tls = tls
        self._on_news = on_news
        self._sources: dict[str, _Source] = {}
        self._lock = threading.Lock()

    def stage(self, ticket: Ticket, until: float) -> int:
        """How far the prefill is, as far as is known (`handoff.NOT_BEGUN` and its like). The first call starts to
        watch, `forget` ends it; from `until` (of time.monotonic()) on nothing is waited for any more. Does not wait."""
        # All ranks stage in the same steps.
        return self.stage_at(ticket.channels[0], ticket.handoff, until)

    def stage_at(self, address: str, handoff: str, until: float) -> int:
        """`stage`, for whoever has no ticket: `address` is the channel of any rank of the producer."""
        with self._lock:
            source = self._sources.setdefault(address, _Source())
            watched = source.handoffs.setdefault(handoff, _Watched())
            start = watched.stage < COMPLETE and not source.looked_after
            source.looked_after |= start
        if start:
            thread = threading.Thread(target=self._run, args=(address, source), name="deeplink-watch", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the process may have no more threads
                self._give_up(source)
        return COMPLETE if time.monotonic() >= until else watched.stage

    def forget(self, ticket: Ticket) -> None:
        """It is no longer to be claimed, or has been."""
        self.forget_at(ticket.channels[0], ticket.handoff)

    def forget_at(self, address: str, handoff: str) -> None:
        """`forget`, for whoever has no ticket."""
        with self._lock:
            source = self._sources.get(address)
            if source is not None:
                source.handoffs.pop(handoff, None)
                if not source.handoffs:  # a thread that is in it ends within a moment
                    del self._sources[address]

    def close(self) -> None:
        """Watch nothing any more; the threads end by themselves, within a moment."""
        with self._lock:
            for source in self._sources.values():
                source.handoffs.clear()
            self._sources.clear()

    def _run(self, address: str, source: _Source) -> None:
        while True:
            try:
                self._watch(address, source)
                return
            except DeeplinkError as exc:
                gone = isinstance(exc.__cause__, ConnectionRefusedError)
                if gone or not isinstance(exc, (PeerGone, DeadlineExceeded)):
                    log.info("deeplink claims at %s are made without a look at their prefills: %s", address, exc)
                    self._give_up(source)
                    return
            time.sleep(RETRY_SECONDS)

    def _watch(self, address: str, source: _Source) -> None:
        """Returns when nothing is waited for any more."""
        channel: ch.Channel | None = None
        try:
            while waited_for := self._waited_for(source):
                if channel is None:
                    channel = ch.Channel.connect(address, self._secret, time.monotonic() + SECONDS, self._tls)
                for at in range(0, len(waited_for), ch.MAX_WATCHED):
                    names, known = zip(*waited_for[at : at + ch.MAX_WATCHED], strict=True)
                    self._look(channel, source, ch.Watch(names, known))
        finally:
            if channel is not None:
                channel.close()

    def _waited_for(self, source: _Source) -> list[tuple[str, int]]:
        """Names and stages. Empty: the thread that asked has nothing more to do, and is not counted on."""
        with self._lock:
            found = [(name, one.stage) for name, one in source.handoffs.items() if one.stage < COMPLETE]
            source.looked_after = bool(found)
            return found

    def _look(self, channel: ch.Channel, source: _Source, asked: ch.Watch) -> None:
        deadline = time.monotonic() + SECONDS
        channel.send(asked, deadline)
        answer = channel.receive(deadline)
        if not isinstance(answer, ch.Watched) or len(answer.stages) != len(asked.handoffs):
            raise ProtocolError(f"{type(answer).__name__} in answer to a watcher")
        further = False
        with self._lock:
            for name, stage in zip(asked.handoffs, answer.stages, strict=True):
                if (watched := source.handoffs.get(name)) is not None and stage > watched.stage:
                    watched.stage, further = stage, True
        if further:
            self._tell()

    def _give_up(self, source: _Source) -> None:
        with self._lock:
            source.looked_after = False
            for watched in source.handoffs.values():
                watched.stage = COMPLETE
        self._tell()

    def _tell(self) -> None:
        if self._on_news is not None:
            self._on_news()
