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
from collections.abc import Mapping, Sequence

from deeplink.errors import (
    Aborted,
    DeadlineExceeded,
    DeeplinkError,
    HandoffError,
    Reason,
    TicketRefused,
)
from deeplink.kvconnector import channel as ch
from deeplink.kvconnector.cache import Cache
from deeplink.kvconnector.handoff import FINAL, Ledger
from deeplink.kvconnector.offer import Offer, Staged
from deeplink.kvconnector.plan import TILE, chunks
from deeplink.kvconnector.pool import Pool
from deeplink.kvconnector.serve import LOOK, Serving, check_claim, check_quit
from deeplink.kvconnector.staging import Staging
from deeplink.kvconnector.ticket import Ticket, other_epoch
from deeplink.kvconnector.transport.base import Link, Transport

log = logging.getLogger(__name__)


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
        self._open: dict[str, Offer] = {}
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
            raise other_epoch(self._epoch, ticket.producer)
        if not self._ledger.begin(ticket.handoff, "producer", "filling"):
            raise TicketRefused("this handoff was opened before", field="handoff", theirs=ticket.handoff)
        handoff = Offer(ticket, prompt, tokens, time.monotonic() + ticket.milliseconds / 1000)
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
            raise other_epoch(self._epoch, ticket.producer)
        if ticket.consumer != consumer:
            raise other_epoch(ticket.consumer, consumer)
        handoff = self._await_open(channel, ticket)
        self._register(handoff)
        # A claim counts however it ends: refused ones and bugs too, or the staging would be held until the deadline.
        failure: DeeplinkError | None = HandoffError("the claim ended unexpectedly; see the prefill engine's log")
        try:
            check_claim(handoff, claim, channel.transport)
            channel.send(ch.Accept(), handoff.deadline)
            serving = Serving(
                handoff,
                channel,
                claim,
                self._cache,
                self._staging,
                self._links,
                self._transports,
                self._changed,
            )
            tokens, moved, total = serving.move()
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

    def _gather(self, handoff: Offer) -> None:
        if handoff.complete:
            return
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
                handoff.staged.append(Staged(chunk, piece, claims=handoff.ticket.claims))
                self._changed.notify_all()
        if handoff.complete:
            self._ledger.enter(handoff.ticket.handoff, "staged")

    def _await_open(self, channel: ch.Channel, ticket: Ticket) -> Offer:
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
            check_quit(channel, deadline)

    def _register(self, handoff: Offer) -> None:
        with self._changed:
            if handoff.claimed == handoff.ticket.claims:
                raise TicketRefused(
                    "this handoff has been claimed already", field="claims", ours=str(handoff.ticket.claims)
                )
            handoff.claimed += 1

    def _unregister(self, handoff: Offer, failure: DeeplinkError | None) -> bool:
        """Account a claim that is over; true for the last one. A failed last one ends the handoff."""
        with self._changed:
            handoff.served += 1
            last = handoff.served == handoff.ticket.claims
        if failure is not None and last:
            states: dict[type[DeeplinkError], str] = {Aborted: "aborted", DeadlineExceeded: "expired"}
            self._end(handoff, states.get(type(failure), "failed"), failure.reason())
        return last

    def _end(
        self,
        handoff: Offer,
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
