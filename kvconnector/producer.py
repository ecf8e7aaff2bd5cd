"""The producer's side: gather finished prefill chunks into staging, and serve them to whoever holds the ticket.

| method  | called by                          | may block |
|---------|------------------------------------|-----------|
| open    | engine thread, first prefill step  | no        |
| fill    | engine thread, after each step     | no        |
| pump    | engine thread, after each step     | no        |
| lose    | engine thread, on preemption       | no        |
| settled | engine thread, after the request   | no        |
| abort   | any thread                         | no        |
| serve   | the channel's thread of one claim  | yes, until the deadline |

Engine blocks are read only inside `fill` and `pump`, on the engine's own thread, so they can be freed, preempted or
reused the moment `settled` is true, whatever the peer does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deeplink.errors import (
    Aborted,
    DeadlineExceeded,
    DeeplinkError,
    HandoffError,
    PeerGone,
    ProtocolError,
    Reason,
    Refused,
    TicketRefused,
)
from deeplink.kvconnector import channel as ch
from deeplink.kvconnector import digest, wire
from deeplink.kvconnector.cache import Cache
from deeplink.kvconnector.handoff import FINAL, Ledger
from deeplink.kvconnector.plan import TILE, Chunk, chunks
from deeplink.kvconnector.pool import Pool
from deeplink.kvconnector.staging import Piece, Staging
from deeplink.kvconnector.ticket import Ticket
from deeplink.kvconnector.transport.base import Link, Push, Transport

log = logging.getLogger(__name__)

AHEAD = 3
"""Chunks announced before the first of them has landed."""
LOOK = 0.05
"""Seconds between two looks at a consumer's connection while waiting for prefill."""


@dataclass(slots=True, eq=False)
class _Staged:
    chunk: Chunk
    piece: Piece
    digests: digest.Tiles | None = None
    claims: int = 0
    """Claims that still have to fetch it."""
    readers: int = 0
    """Threads that are reading the piece now."""


@dataclass(slots=True)
class _Handoff:
    """One open handoff. Guarded by the producer's lock, except `table` and `computed` (engine thread only)."""

    ticket: Ticket
    prompt: bytes
    tokens: int
    deadline: float
    table: Sequence[int] = ()
    computed: int = 0
    staged: list[_Staged] = field(default_factory=list)
    claimed: int = 0
    served: int = 0
    ended: Reason | None = None
    links: set[Link] = field(default_factory=set)

    @property
    def watermark(self) -> int:
        return self.staged[-1].chunk.stop if self.staged else 0

    @property
    def complete(self) -> bool:
        return self.watermark == self.tokens


class Producer:
    """All handoffs this process produces."""

    def __init__(
        self,
        cache: Cache,
        staging: Staging,
        ledger: Ledger,
        transports: Mapping[str, Transport],
        epoch: str,
        chunk_bytes: int,
    ) -> None:
        self._cache = cache
        self._staging = staging
        self._ledger = ledger
        self._transports = transports
        self._links: Pool[Link] = Pool()
        self._epoch = epoch
        self._chunk_tokens = max(TILE, chunk_bytes // cache.token_bytes)
        self._open: dict[str, _Handoff] = {}
        self._closed = False
        self._changed = threading.Condition()
        threading.Thread(target=self._expire, name="deeplink-expiry", daemon=True).start()

    @property
    def claims(self) -> int:
        """Claims that are being served now."""
        with self._changed:
            return sum(handoff.claimed - handoff.served for handoff in self._open.values())

    # -- engine thread ---------------------------------------------------------------------------------------

    def open(self, ticket: Ticket, prompt: bytes, tokens: int) -> None:
        """Begin a handoff of a prompt of `tokens` tokens. Raises TicketRefused for another epoch or a known id."""
        if ticket.producer != self._epoch:
            raise _other_epoch(self._epoch, ticket.producer)
        if not self._ledger.begin(ticket.handoff, "producer", "filling"):
            raise TicketRefused("this handoff was opened before", field="handoff", theirs=ticket.handoff)
        handoff = _Handoff(ticket, prompt, tokens, time.monotonic() + ticket.milliseconds / 1000)
        with self._changed:
            self._open[ticket.handoff] = handoff
            self._changed.notify_all()

    def fill(self, name: str, table: Sequence[int], computed: int) -> None:
        """Prefill has now computed `computed` tokens; they are in the blocks of `table`. Stages what fits."""
        handoff = self._open.get(name)
        if handoff is not None:
            handoff.table, handoff.computed = table, computed
            self._gather(handoff)

    def lose(self, name: str) -> None:
        """The blocks of the last `fill` are no longer this request's (preemption). What is staged stays good."""
        handoff = self._open.get(name)
        if handoff is not None:
            handoff.table, handoff.computed = (), 0

    def pump(self) -> None:
        """Stage what did not fit before."""
        for handoff in list(self._open.values()):
            self._gather(handoff)

    def settled(self, name: str) -> bool:
        """Whether the request's blocks are no longer needed: all is staged, or the handoff has ended."""
        handoff = self._open.get(name)
        return handoff is None or handoff.complete

    # -- any thread ------------------------------------------------------------------------------------------

    def abort(self, name: str, reason: Reason | None = None) -> None:
        handoff = self._open.get(name)
        if handoff is not None:
            self._end(handoff, "aborted", reason or Aborted("the prefill request was given up").reason())

    def close(self) -> None:
        """Abort what is open and close what is kept open."""
        for name in list(self._open):
            self.abort(name, Aborted("the engine shuts down").reason())
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._links.close()

    def serve(self, channel: ch.Channel, claim: ch.Claim, ticket: Ticket, consumer: str) -> None:
        """Serve one claim of the engine with epoch `consumer` to its end. Raises what is to be told to the consumer."""
        if ticket.producer != self._epoch:
            raise _other_epoch(self._epoch, ticket.producer)
        if ticket.consumer != consumer:
            raise _other_epoch(ticket.consumer, consumer)
        handoff = self._await_open(channel, ticket)
        self._register(handoff)
        # A claim counts however it ends: refused ones and bugs too, or the staging would be held until the deadline.
        failure: DeeplinkError | None = HandoffError("the claim ended unexpectedly; see the prefill engine's log")
        try:
            _check_claim(handoff, claim, channel.transport)
            channel.send(ch.Accept(), handoff.deadline)
            tokens, moved, total = self._move(channel, claim, handoff)
            failure = None
        except DeeplinkError as exc:
            failure = exc
            raise
        finally:
            last = self._unregister(handoff, failure)
        if last:
            self._end(handoff, "drained", None, tokens=tokens, kv_bytes=moved, digest=total)
        channel.send(ch.End(), handoff.deadline)

    # -- inside ----------------------------------------------------------------------------------------------

    def _gather(self, handoff: _Handoff) -> None:
        done = handoff.computed >= handoff.tokens
        limit = handoff.tokens if done else handoff.computed // TILE * TILE
        for chunk in chunks(handoff.watermark, limit, self._chunk_tokens):
            piece = self._staging.try_allocate(chunk.tokens * self._cache.token_bytes)
            if piece is None:
                return
            try:
                wire_LSHTD = self._staging.array(piece, self._cache.dtype, self._cache.wire_shape(chunk.tokens))
                self._cache.gather(handoff.table, chunk, wire_LSHTD)
            except DeeplinkError:
                self._staging.release(piece)
                raise
            with self._changed:
                if handoff.ended is not None:
                    self._staging.release(piece)
                    return
                handoff.staged.append(_Staged(chunk, piece, claims=handoff.ticket.claims))
                self._changed.notify_all()
        if handoff.complete:
            self._ledger.enter(handoff.ticket.handoff, "staged")

    def _await_open(self, channel: ch.Channel, ticket: Ticket) -> _Handoff:
        """The handoff, once the engine has opened it: a claim may come before prefill starts."""
        deadline = time.monotonic() + ticket.milliseconds / 1000
        while True:
            with self._changed:
                handoff = self._open.get(ticket.handoff)
                if handoff is not None:
                    return handoff
                record = self._ledger.get(ticket.handoff)
                if record is None:
                    self._changed.wait(LOOK)
            # A record that is not final belongs to an `open` that is just under way.
            if record is not None and record.state in FINAL:
                if record.reason is not None:
                    raise DeeplinkError.from_reason(record.reason)
                raise TicketRefused("this handoff has ended", field="handoff", theirs=record.state)
            if time.monotonic() > deadline:
                raise DeadlineExceeded("prefill did not start before the deadline")
            _check_quit(channel, deadline)

    def _register(self, handoff: _Handoff) -> None:
        with self._changed:
            if handoff.claimed == handoff.ticket.claims:
                raise TicketRefused(
                    "this handoff has been claimed already", field="claims", ours=str(handoff.ticket.claims)
                )
            handoff.claimed += 1

    def _unregister(self, handoff: _Handoff, failure: DeeplinkError | None) -> bool:
        """Account a claim that is over; true for the last one. A failed last one ends the handoff."""
        with self._changed:
            handoff.served += 1
            last = handoff.served == handoff.ticket.claims
        if failure is not None and last:
            states: dict[type[DeeplinkError], str] = {Aborted: "aborted", DeadlineExceeded: "expired"}
            self._end(handoff, states.get(type(failure), "failed"), failure.reason())
        return last

    def _move(self, channel: ch.Channel, claim: ch.Claim, handoff: _Handoff) -> tuple[int, int, int]:
        """Announce, push and account every chunk that overlaps the claim; tokens, bytes and digest moved."""
        if claim.start == claim.stop:
            return 0, 0, 0
        peer = claim.transport, claim.address
        link = self._links.take(peer) or self._connect(channel, claim, handoff)
        with self._changed:
            handoff.links.add(link)
        tokens = moved = total = 0
        waiting: deque[_Staged] = deque()
        index, healthy = 0, False
        try:
            while True:
                while len(waiting) < AHEAD and (staged := self._next(handoff, index, claim.stop)) is not None:
                    index += 1
                    if staged.chunk.stop <= claim.start:
                        self._landed(staged)
                        continue
                    if staged.digests is None:
                        staged.digests = self._digest(staged)
                    waiting.append(staged)
                    channel.send(
                        ch.Chunk(
                            index - 1,
                            staged.chunk.start,
                            staged.chunk.stop,
                            staged.piece.length,
                            staged.digests.tobytes(),
                        ),
                        handoff.deadline,
                    )
                    tokens += staged.chunk.tokens
                    moved += staged.piece.length
                    total += digest.total(staged.digests)
                if not waiting:
                    if index and handoff.staged[index - 1].chunk.stop >= claim.stop:
                        healthy = True
                        return tokens, moved, total & 0xFFFF_FFFF_FFFF_FFFF
                    self._await_chunk(channel, handoff, index)
                    continue
                self._answer(channel, _hear(channel, handoff), handoff, waiting, link)
        except DeeplinkError as exc:
            # When the handoff was ended from elsewhere, the broken link is the consequence, not the cause.
            if handoff.ended is not None:
                raise DeeplinkError.from_reason(handoff.ended) from exc
            # The consumer says farewell and withdraws its regions; a push that breaks tells less than the farewell.
            if isinstance(exc, (PeerGone, Refused)) and (reason := channel.last_words()) is not None:
                raise DeeplinkError.from_reason(reason) from exc
            raise
        finally:
            with self._changed:
                handoff.links.discard(link)
                # `_end` closes the links it has found here, so one it may have seen is not kept for others.
                healthy = healthy and handoff.ended is None
            if healthy:
                self._links.give(peer, link)
            else:
                link.close()
                self._links.drop(peer)

    def _connect(self, channel: ch.Channel, claim: ch.Claim, handoff: _Handoff) -> Link:
        try:
            return self._transports[claim.transport].connect(claim.address, handoff.deadline)
        except PeerGone as exc:
            # A consumer that shuts down says so on the channel, and its transport is gone at the same moment.
            if (reason := channel.last_words()) is not None:
                raise DeeplinkError.from_reason(reason) from exc
            raise

    def _next(self, handoff: _Handoff, index: int, stop: int) -> _Staged | None:
        with self._changed:
            if handoff.ended is not None:
                raise DeeplinkError.from_reason(handoff.ended)
            if index < len(handoff.staged) and handoff.staged[index].chunk.start < stop:
                return handoff.staged[index]
            return None

    def _await_chunk(self, channel: ch.Channel, handoff: _Handoff, index: int) -> None:
        with self._changed:
            if index >= len(handoff.staged) and handoff.ended is None:
                self._changed.wait(LOOK)
        _check_quit(channel, handoff.deadline)

    def _answer(
        self, channel: ch.Channel, message: ch.Message, handoff: _Handoff, waiting: deque[_Staged], link: Link
    ) -> None:
        if isinstance(message, ch.Quit):
            raise DeeplinkError.from_reason(message.reason)
        if isinstance(message, ch.Grant):
            for staged in waiting:
                if handoff.staged[message.index : message.index + 1] == [staged]:
                    self._push(handoff, staged, message.key, link)
                    channel.send(ch.Sent(message.index), handoff.deadline)
                    return
        if isinstance(message, ch.Landed) and handoff.staged[message.index : message.index + 1] == [waiting[0]]:
            self._landed(waiting.popleft())
            return
        raise ProtocolError(f"{type(message).__name__} out of turn")

    def _push(self, handoff: _Handoff, staged: _Staged, key: bytes, link: Link) -> None:
        with self._changed:
            if handoff.ended is not None:
                raise DeeplinkError.from_reason(handoff.ended)
            staged.readers += 1
        try:
            link.push([Push(self._staging.view(staged.piece), key, 0)], handoff.deadline)
        finally:
            with self._changed:
                staged.readers -= 1
                if handoff.ended is not None and not staged.readers:
                    self._staging.release(staged.piece)

    def _digest(self, staged: _Staged) -> digest.Tiles:
        # Should the handoff end meanwhile, the piece may be another's already; then the number is never used.
        wire_LSHTD = self._staging.array(staged.piece, self._cache.dtype, self._cache.wire_shape(staged.chunk.tokens))
        return digest.tiles(staged.chunk, wire_LSHTD)

    def _landed(self, staged: _Staged) -> None:
        with self._changed:
            staged.claims -= 1
            if staged.claims == 0 and not staged.readers:
                self._staging.release(staged.piece)

    def _end(
        self,
        handoff: _Handoff,
        state: str,
        reason: Reason | None,
        *,
        tokens: int = 0,
        kv_bytes: int = 0,
        digest: int | None = None,
    ) -> None:
        with self._changed:
            if self._open.pop(handoff.ticket.handoff, None) is None:
                return
            handoff.ended = reason or Reason(state, f"the handoff has {state}")
            for staged in handoff.staged:
                if staged.claims > 0 and not staged.readers:
                    self._staging.release(staged.piece)
                staged.claims = 0
            links = list(handoff.links)
            self._changed.notify_all()
        for link in links:
            link.close()
        self._ledger.end(handoff.ticket.handoff, state, reason, tokens=tokens, kv_bytes=kv_bytes, digest=digest)

    def _expire(self) -> None:
        while not self._closed:
            with self._changed:
                now = time.monotonic()
                late = [handoff for handoff in self._open.values() if handoff.deadline <= now]
                if not late and not self._closed:
                    first = min((handoff.deadline for handoff in self._open.values()), default=None)
                    self._changed.wait(None if first is None else first - now)
            for handoff in late:
                self._end(
                    handoff,
                    "expired",
                    DeadlineExceeded("nobody fetched the KV cache before the ticket's deadline").reason(),
                )


def _check_claim(handoff: _Handoff, claim: ch.Claim, transport: str) -> None:
    if claim.transport != transport:
        raise Refused(
            "the claim is for another transport than agreed", field="transport", ours=transport, theirs=claim.transport
        )
    if claim.prompt != handoff.prompt:
        raise Refused(
            "the two engines do not have the same prompt",
            field="prompt",
            ours=handoff.prompt.hex(),
            theirs=claim.prompt.hex(),
            remedy="serve the same tokenizer and chat template on both engines",
        )
    if not claim.start <= claim.stop <= handoff.tokens:
        raise ProtocolError(f"tokens [{claim.start}, {claim.stop}) of a prompt of {handoff.tokens}")


def _hear(channel: ch.Channel, handoff: _Handoff) -> ch.Message:
    """What the consumer says next. It may be long silent, waiting for room, so the handoff's end is looked for too."""
    while not channel.readable(LOOK):
        if handoff.ended is not None:
            raise DeeplinkError.from_reason(handoff.ended)
        wire.remaining(handoff.deadline)
    return channel.receive(handoff.deadline)


def _check_quit(channel: ch.Channel, deadline: float) -> None:
    """While nothing is expected from the consumer, anything that comes is its farewell."""
    if channel.readable(0):
        message = channel.receive(deadline)
        if isinstance(message, ch.Quit):
            raise DeeplinkError.from_reason(message.reason)
        raise ProtocolError(f"{type(message).__name__} out of turn")


def _other_epoch(ours: str, theirs: str) -> TicketRefused:
    return TicketRefused(
        "the ticket is for another incarnation of this engine",
        field="epoch",
        ours=ours,
        theirs=theirs,
        remedy="the engine was restarted; ask again",
    )
