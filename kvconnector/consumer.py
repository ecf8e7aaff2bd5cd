"""The consumer's side: claim a handoff, receive its chunks, verify them, and scatter them into the engine's blocks.

`load` starts a thread per handoff and returns; `collect` gives what has ended since the last call. Between the two
the blocks in the order belong to the consumer: the engine must neither free nor read them. `cancel` ends a load now.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from deeplink.errors import (
    Aborted,
    DeadlineExceeded,
    DeeplinkError,
    DigestMismatch,
    HandoffError,
    PeerGone,
    ProtocolError,
    Reason,
)
from deeplink.kvconnector import channel as ch
from deeplink.kvconnector import digest
from deeplink.kvconnector.cache import Cache
from deeplink.kvconnector.handoff import Ledger
from deeplink.kvconnector.plan import Chunk
from deeplink.kvconnector.pool import Pool
from deeplink.kvconnector.staging import Piece, Staging
from deeplink.kvconnector.ticket import Ticket
from deeplink.kvconnector.transport.base import Region, Transport

_MASK = (1 << 64) - 1
LOOK = 0.05
"""Seconds between two looks at the channel while waiting for room."""
FAREWELL_SECONDS = 1.0
DIAL_SECONDS = 10.0
"""For connecting and the exchange of contracts."""


def _given_up() -> Aborted:
    return Aborted("the decode request was given up")


@dataclass(frozen=True, slots=True)
class Order:
    """Load tokens ``[start, stop)`` of `prompt` into the blocks of `table`, before the ticket's time is up.

    `request` is the engine's own name for who waits. An empty range loads nothing and only lets the producer go.
    """

    request: str
    ticket: Ticket
    ticket_text: str
    prompt: bytes
    start: int
    stop: int
    table: Sequence[int]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one load ended; `reason` is None when every token is in its block, verified."""

    order: Order
    reason: Reason | None


class Dial(Protocol):
    """Opens a channel to a producer, on which the transport is agreed. Raises Refused, PeerGone, …"""

    def __call__(self, address: str, deadline: float) -> ch.Channel: ...


@dataclass(slots=True)
class _Load:
    order: Order
    deadline: float
    channel: ch.Channel | None = None
    cancelled: bool = False
    over: bool = False
    writing: threading.Lock = field(default_factory=threading.Lock)
    """Held while blocks are written, and to set `over`: after that none is."""
    tokens: int = 0
    moved: int = 0
    total: int = 0


@dataclass(slots=True)
class _Landing:
    """A chunk that was announced: first without, then with a place in staging the peer may push to."""

    message: ch.Chunk
    piece: Piece | None = None
    region: Region | None = None


class Consumer:
    """All handoffs this process consumes."""

    def __init__(
        self,
        cache: Cache,
        staging: Staging,
        ledger: Ledger,
        transports: Mapping[str, Transport],
        dial: Dial,
        *,
        verify: bool,
    ) -> None:
        self._cache = cache
        self._staging = staging
        self._ledger = ledger
        self._transports = transports
        self._dial = dial
        self._verify = verify
        self._channels: Pool[ch.Channel] = Pool()
        self._loads: dict[str, _Load] = {}
        self._ended: deque[Outcome] = deque()
        self._lock = threading.Lock()

    @property
    def claims(self) -> int:
        with self._lock:
            return len(self._loads)

    def load(self, order: Order) -> None:
        """Start loading. Never raises: what cannot start ends at once as failed.

        So does an id that was loaded before: one incarnation claims an id once.
        """
        name = order.ticket.handoff
        if not self._ledger.begin(name, "consumer", "receiving"):
            reason = Reason("ticket_refused", "this handoff was claimed before", field="handoff", theirs=name)
            self._ended.append(Outcome(order, reason))
            return
        load = _Load(order, time.monotonic() + order.ticket.milliseconds / 1000)
        with self._lock:
            self._loads[name] = load
        try:
            threading.Thread(target=self._run, args=(load,), name=f"deeplink-load-{name}", daemon=True).start()
        except RuntimeError as exc:  # the process may have no more threads
            error = HandoffError(f"the load could not start: {exc}", remedy="raise the engine's limit of threads")
            self._end(load, error.reason())

    def cancel(self, name: str, request: str | None = None) -> None:
        """End the load now: when this returns nothing is written to its blocks any more, whatever the producer does.

        The producer is told, without waiting for it. With `request`, only if it is that one's load.
        """
        with self._lock:
            load = self._loads.get(name)
        if load is not None and request in (None, load.order.request):
            self._give_up(load)

    def close(self) -> None:
        """Give up what is loading, let the producers know (within a second), and close what is kept open."""
        with self._lock:
            loads = list(self._loads.values())
        for thread in [self._give_up(load) for load in loads]:
            if thread is not None:
                thread.join(FAREWELL_SECONDS)
        self._channels.close()

    def _give_up(self, load: _Load) -> threading.Thread | None:
        with self._lock:
            load.cancelled = True
            channel = load.channel
        self._end(load, _given_up().reason())
        # In a thread: a producer that does not read must not hold up the engine.
        thread = threading.Thread(target=_part, args=(channel,), name="deeplink-part", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads: the end of the connection has to tell it
            if channel is not None:
                channel.close()
            return None
        return thread

    def collect(self) -> list[Outcome]:
        """The loads that ended since the last call, each exactly once."""
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def _run(self, load: _Load) -> None:
        # Whatever happens in this thread, the engine hears of the end: a request must not wait for a dead thread.
        reason: Reason | None = HandoffError("the load ended unexpectedly; see the engine's log").reason()
        try:
            self._receive(load)
            reason = None
        except DeeplinkError as exc:
            reason = exc.reason()
        finally:
            self._end(load, reason)

    def _end(self, load: _Load, reason: Reason | None) -> None:
        """Close the load, once; who comes second changes nothing."""
        with load.writing:
            if load.over:
                return
            load.over = True
        name = load.order.ticket.handoff
        with self._lock:
            del self._loads[name]
        self._ledger.end(
            name,
            "loaded" if reason is None else "failed",
            reason,
            tokens=load.tokens,
            kv_bytes=load.moved,
            digest=load.total if self._verify else None,
        )
        self._ended.append(Outcome(load.order, reason))

    def _receive(self, load: _Load) -> None:
        address = load.order.ticket.channel
        channel = self._claim(load, address)
        landings: dict[int, _Landing] = {}
        healthy = False
        try:
            self._converse(load, channel, landings)
            healthy = True
        except PeerGone as exc:
            if (reason := channel.last_words()) is not None:
                raise DeeplinkError.from_reason(reason) from exc
            raise
        except DeeplinkError as exc:
            _farewell(channel, exc.reason())
            raise
        finally:
            for landing in landings.values():
                self._clear(landing)
            # Under the lock: a cancel that comes now must not close a channel that another load may have taken.
            with self._lock:
                healthy = healthy and not load.cancelled
                load.channel = None
            if healthy:
                self._channels.give(address, channel)
            else:
                channel.close()

    def _claim(self, load: _Load, address: str) -> ch.Channel:
        """An accepted claim. A kept connection that turns out broken is replaced once by a fresh one."""
        order = load.order
        while True:
            kept = self._channels.take(address)
            channel = kept or self._dial(address, min(load.deadline, time.monotonic() + DIAL_SECONDS))
            with self._lock:
                load.channel = channel
                cancelled = load.cancelled
            try:
                if cancelled:
                    raise _given_up()
                channel.send(self._make_claim(order, channel.transport), load.deadline)
                answer = channel.receive(load.deadline)
                if isinstance(answer, ch.Fail):
                    raise DeeplinkError.from_reason(answer.reason)
                if not isinstance(answer, ch.Accept):
                    raise ProtocolError(f"{type(answer).__name__} in answer to a claim")
            except PeerGone:
                channel.close()
                if kept is None or load.cancelled:
                    raise
            except DeeplinkError:
                channel.close()
                raise
            else:
                return channel

    def _make_claim(self, order: Order, transport: str) -> ch.Claim:
        address = self._transports[transport].address
        return ch.Claim(order.ticket_text, order.prompt, order.start, order.stop, transport, address)

    def _converse(self, load: _Load, channel: ch.Channel, landings: dict[int, _Landing]) -> None:
        covered = load.order.start
        waiting: deque[int] = deque()
        while True:
            self._grant(load, channel, landings, waiting)
            message = channel.receive(load.deadline)
            if isinstance(message, ch.Chunk):
                self._check(message, covered, landings)
                covered = message.stop
                landings[message.index] = _Landing(message)
                waiting.append(message.index)
            elif isinstance(message, ch.Sent) and (landing := landings.get(message.index)) and landing.region:
                self._land(load, landing)
                self._clear(landings.pop(message.index))
                channel.send(ch.Landed(message.index), load.deadline)
            elif isinstance(message, ch.End) and not landings and covered >= load.order.stop:
                return
            elif isinstance(message, ch.Fail):
                raise DeeplinkError.from_reason(message.reason)
            else:
                raise ProtocolError(f"{type(message).__name__} out of turn")

    def _check(self, message: ch.Chunk, covered: int, landings: dict[int, _Landing]) -> None:
        """Chunks come in order, each starting where the last ended (the first may begin before what is missing)."""
        length = (message.stop - message.start) * self._cache.token_bytes
        if not message.start <= covered < message.stop or message.length != length or message.index in landings:
            raise ProtocolError(
                f"a chunk of tokens [{message.start}, {message.stop}) with {message.length} bytes, "
                f"when token {covered} was next and {length} bytes are right"
            )
        if len(message.digests) % 8:
            raise ProtocolError(f"{len(message.digests)} bytes of digests, which are 8 bytes each")

    def _grant(self, load: _Load, channel: ch.Channel, landings: dict[int, _Landing], waiting: deque[int]) -> None:
        """Give announced chunks a place. Waits for room only while it holds none itself, so loads cannot deadlock."""
        while waiting:
            landing = landings[waiting[0]]
            landing.piece = self._staging.try_allocate(landing.message.length)
            while landing.piece is None:
                if any(other.region for other in landings.values()) or channel.readable(0):
                    return
                landing.piece = self._wait_for_room(load, landing.message.length)
            landing.region = self._transports[channel.transport].register(self._staging.view(landing.piece))
            channel.send(ch.Grant(waiting.popleft(), landing.region.key), load.deadline)

    def _wait_for_room(self, load: _Load, length: int) -> Piece | None:
        """A short wait, so that a cancel or the producer's Fail does not have to wait for other loads to end."""
        if load.cancelled:
            raise _given_up()
        try:
            return self._staging.allocate(length, min(load.deadline, time.monotonic() + LOOK))
        except DeadlineExceeded:
            if time.monotonic() >= load.deadline:
                raise
            return None

    def _land(self, load: _Load, landing: _Landing) -> None:
        """Verify a chunk that has arrived and scatter the part of it that was asked for."""
        assert landing.region is not None
        assert landing.piece is not None
        landing.region.withdraw()
        landing.region = None
        message, order = landing.message, load.order
        chunk = Chunk(message.start, message.stop)
        wire = self._staging.array(landing.piece, self._cache.dtype, self._cache.wire_shape(chunk.tokens))
        if self._verify:
            theirs = np.frombuffer(message.digests, "<u8")
            ours = digest.tiles(chunk, wire)
            if theirs.size != ours.size or (wrong := np.flatnonzero(ours.reshape(-1) != theirs)).size:
                raise _mismatch(chunk, ours, theirs, int(wrong[0]) if theirs.size == ours.size else -1)
            load.total = (load.total + digest.total(ours)) & _MASK
        wanted = Chunk(max(chunk.start, order.start), min(chunk.stop, order.stop))
        if wanted.tokens > 0:
            with load.writing:
                if load.over:
                    raise _given_up()
                self._cache.scatter(wire, chunk.start, order.table, wanted)
            load.tokens += wanted.tokens
        load.moved += message.length

    def _clear(self, landing: _Landing) -> None:
        if landing.region is not None:
            landing.region.withdraw()
            landing.region = None
        if landing.piece is not None:
            self._staging.release(landing.piece)
            landing.piece = None


def _part(channel: ch.Channel | None) -> None:
    if channel is not None:
        _farewell(channel, _given_up().reason())
        channel.close()


def _farewell(channel: ch.Channel, reason: Reason) -> None:
    # A peer that is gone already knows what the farewell would have told it.
    with contextlib.suppress(DeeplinkError):
        channel.send(ch.Quit(reason), time.monotonic() + FAREWELL_SECONDS)


def _mismatch(chunk: Chunk, ours: digest.Tiles, theirs: digest.Tiles, wrong: int) -> DigestMismatch:
    if wrong < 0:
        return DigestMismatch(
            "the chunk came with another number of digests",
            field="digest",
            ours=str(ours.size),
            theirs=str(theirs.size),
        )
    layer, side, head, tile = (int(place) for place in np.unravel_index(wrong, ours.shape))
    return DigestMismatch(
        f"the KV cache that arrived is not what was staged: layer {layer}, {'kv'[side]}, head {head}, "
        f"tile {tile} of tokens [{chunk.start}, {chunk.stop})",
        field="digest",
        ours=f"{int(ours.reshape(-1)[wrong]):016x}",
        theirs=f"{int(theirs[wrong]):016x}",
        remedy="the link or a host corrupts memory; run the handoff again and look at both hosts",
    )
