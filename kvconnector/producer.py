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

A claim whose connection breaks is not over: its consumer has a short time to come back for what it has not verified
yet. A connection that the peer's side has closed is given less time than one that has gone silent.

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
    CastRefused,
    DeadlineExceeded,
    DeeplinkError,
    HandoffError,
    LinkLost,
    PeerGone,
    Reason,
    Refused,
    TicketRefused,
)
from deeplink.kvconnector import channel as ch
from deeplink.kvconnector.cast import between
from deeplink.kvconnector.group import Group
from deeplink.kvconnector.handoff import FINAL, Ledger
from deeplink.kvconnector.offer import Offer, Staged, Taking
from deeplink.kvconnector.plan import TILE, chunks
from deeplink.kvconnector.pool import Pool
from deeplink.kvconnector.serve import LOOK, Serving, check_claim, check_quit, release
from deeplink.kvconnector.staging import Staging
from deeplink.kvconnector.ticket import Ticket, other_epoch
from deeplink.kvconnector.transport.base import Link, Transport

log = logging.getLogger(__name__)

CLOSED_SECONDS = 1.0
LOST_SECONDS = 30.0
"""How long a claim whose connection was closed, or has gone silent, is kept for its consumer to come back."""
LET_GO_SECONDS = 5.0


class Producer:
    """All handoffs this process produces. `rank` is its place among the ranks of its engine."""

    def __init__(
        self,
        groups: Sequence[Group],
        staging: Staging,
        ledger: Ledger,
        transports: Mapping[str, Transport],
        epoch: str,
        chunk_bytes: int,
        rank: int = 0,
    ) -> None:
        self._groups = groups
        self._staging = staging
        self._ledger = ledger
        self._transports = transports
        self._links: Pool[Link] = Pool()
        self._epoch = epoch
        self._chunk_bytes = chunk_bytes
        self._rank = rank
        self._open: dict[str, Offer] = {}
        self._closed = False
        self._changed = threading.Condition()
        threading.Thread(target=self._expire, name="deeplink-expiry", daemon=True).start()

    @property
    def claims(self) -> int:
        """Claims that are being served now, or whose consumer may come back."""
        with self._changed:
            return sum(len(offer.claims) - offer.served for offer in self._open.values())

    # -- engine thread ---------------------------------------------------------------------------------------

    def open(self, ticket: Ticket, prompt: bytes, tokens: int) -> None:
        """Begin a handoff of a prompt of `tokens` tokens. Raises TicketRefused for another epoch or a known id."""
        if ticket.producer != self._epoch:
            raise other_epoch(self._epoch, ticket.producer)
        wire = ticket.wire or tuple(group.spec.dtype for group in self._groups)
        if len(wire) != len(self._groups) or not all(map(_casts, self._groups, wire)):
            raise TicketRefused(
                "the ticket wants element types that this cache is not cast to",
                field="wire",
                ours=", ".join(group.spec.dtype for group in self._groups),
                theirs=", ".join(wire),
                remedy="the router has an old contract of this engine; ask again",
            )
        if not self._ledger.begin(ticket.handoff, "producer", "filling"):
            raise TicketRefused("this handoff was opened before", field="handoff", theirs=ticket.handoff)
        ranges = tuple(group.offered(tokens) for group in self._groups)
        offer = Offer(
            ticket,
            prompt,
            tokens,
            time.monotonic() + ticket.milliseconds / 1000,
            ticket.expected(self._rank),
            wire,
            ranges,
            [start for start, _ in ranges],
        )
        with self._changed:
            self._open[ticket.handoff] = offer
            self._changed.notify_all()
        if offer.expected == 0:  # other ranks hold the same heads, and all come to those
            self._end(offer, "drained", None)

    def fill(self, name: str, tables: Sequence[Sequence[int]], computed: int) -> None:
        """Prefill has now computed `computed` tokens; they are in the blocks of `tables`, one per cache group.

        Stages what fits.
        """
        offer = self._open.get(name)
        if offer is not None:
            offer.tables, offer.computed = tables, computed
            self._gather(offer)

    def lose(self, name: str) -> None:
        """The blocks of the last `fill` are no longer this request's (preemption). What is staged stays good."""
        offer = self._open.get(name)
        if offer is not None:
            offer.tables, offer.computed = (), 0

    def pump(self) -> None:
        """Stage what did not fit before."""
        for offer in list(self._open.values()):
            self._gather(offer)

    def settled(self, name: str) -> bool:
        """Whether the request's blocks are no longer needed: all is staged, or the handoff has ended."""
        offer = self._open.get(name)
        return offer is None or offer.complete

    # -- any thread ------------------------------------------------------------------------------------------

    def abort(self, name: str, reason: Reason | None = None) -> None:
        offer = self._open.get(name)
        if offer is not None:
            self._end(offer, "aborted", reason or Aborted("the prefill request was given up").reason())

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
        offer = self._await_open(channel, ticket)
        taking = self._admit(offer, claim, channel)
        # A claim counts however it ends: refused ones and bugs too, or the staging would be held until the deadline.
        failure: DeeplinkError | None = HandoffError("the claim ended unexpectedly; see the prefill engine's log")
        try:
            check_claim(offer, claim, channel, self._groups)
            channel.send(ch.Accept(), offer.deadline)
            Serving(
                offer,
                taking,
                channel,
                claim,
                self._groups,
                self._staging,
                self._links,
                self._transports,
                self._changed,
            ).move()
            failure = None
        except DeeplinkError as exc:
            failure = exc
            raise
        finally:
            self._leave(offer, taking, channel, failure)
        channel.send(ch.End(), offer.deadline)

    # -- staging ---------------------------------------------------------------------------------------------

    def _gather(self, offer: Offer) -> None:
        """Stage what has been computed and fits, group by group."""
        if offer.complete:
            return
        try:
            for index, group in enumerate(self._groups):
                if not self._gather_group(offer, index, group):
                    return
        except CastRefused as exc:
            # A value of this prompt does not fit; the engine and its other requests are in order.
            log.warning("deeplink handoff %s ends: %s", offer.ticket.handoff, exc)
            self._end(offer, "failed", exc.reason())
            return
        if offer.complete:
            self._ledger.enter(offer.ticket.handoff, "staged")

    def _gather_group(self, offer: Offer, index: int, group: Group) -> bool:
        """False when staging is full or the handoff has ended."""
        _, stop = offer.ranges[index]
        limit = stop if offer.computed >= offer.tokens else min(stop, offer.computed) // TILE * TILE
        form = group.wire(offer.wire[index])
        for chunk in chunks(offer.marks[index], limit, self._chunk_bytes // form.token_bytes):
            piece = self._staging.try_allocate(form.length(chunk.tokens))
            if piece is None:
                return False
            try:
                group.stage(offer.tables[index], chunk, self._staging.view(piece), form.dtype)
            except DeeplinkError:
                self._staging.release(piece)
                raise
            with self._changed:
                if offer.ended is not None:
                    self._staging.release(piece)
                    return False
                offer.staged.append(Staged(index, chunk, piece, offer.expected - offer.served))
                offer.marks[index] = chunk.stop
                self._changed.notify_all()
        return True

    # -- claims ----------------------------------------------------------------------------------------------

    def _await_open(self, channel: ch.Channel, ticket: Ticket) -> Offer:
        """The handoff, once the engine has opened it: a claim may come before prefill starts."""
        deadline = time.monotonic() + ticket.milliseconds / 1000
        while True:
            with self._changed:
                offer = self._open.get(ticket.handoff)
                if offer is not None:
                    return offer
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

    def _admit(self, offer: Offer, claim: ch.Claim, channel: ch.Channel) -> Taking:
        """A new claim, or one that comes back after its connection broke and takes over from that."""
        with self._changed:
            taking = offer.claims.get(claim.claim)
            if taking is None:
                if len(offer.claims) >= offer.expected:
                    raise TicketRefused(
                        "this handoff has been claimed already", field="claims", ours=str(offer.expected)
                    )
                taking = offer.claims[claim.claim] = Taking(channel=channel)
                return taking
            if (old := taking.channel) is not None:
                # It may be asleep on a connection that is dead; closing that wakes it.
                old.close()
                if taking.link is not None:
                    taking.link.close()
                self._changed.wait_for(lambda: taking.channel is None, LET_GO_SECONDS)
            if taking.over or taking.channel is not None:
                raise TicketRefused("this claim is over", field="claim", theirs=claim.claim.hex())
            taking.channel, taking.lost_until = channel, None
            taking.resumed += 1
            return taking

    def _leave(self, offer: Offer, taking: Taking, channel: ch.Channel, failure: DeeplinkError | None) -> None:
        """The claim is no longer served on this channel: because it is over, or because the connection broke."""
        with self._changed:
            taking.channel = None
            broken = offer.ended is None and failure is not None and _broken(failure, channel)
            if broken:
                seconds = LOST_SECONDS if isinstance(failure, LinkLost) else CLOSED_SECONDS
                taking.broke = failure
                taking.lost_until = min(offer.deadline, time.monotonic() + seconds)
            self._changed.notify_all()
        if not broken:
            self._finish(offer, taking, failure)

    def _finish(self, offer: Offer, taking: Taking, failure: DeeplinkError | None) -> None:
        """Account a claim that is over, and let go of what it has not fetched. The last one ends the handoff."""
        with self._changed:
            if taking.over:
                return
            taking.over = True
            offer.served += 1
            last = offer.served == offer.expected
            if offer.ended is None and not last:
                for staged in offer.staged[taking.done :]:
                    release(staged, self._staging)
        if not last:
            return
        if failure is None:
            self._end(offer, "drained", None)
        else:
            states: dict[type[DeeplinkError], str] = {Aborted: "aborted", DeadlineExceeded: "expired"}
            self._end(offer, states.get(type(failure), "failed"), failure.reason())

    # -- the end ---------------------------------------------------------------------------------------------

    def _end(self, offer: Offer, state: str, reason: Reason | None) -> None:
        with self._changed:
            if self._open.pop(offer.ticket.handoff, None) is None:
                return
            offer.ended = reason or Reason(state, f"the handoff has {state}")
            for staged in offer.staged:
                if staged.claims > 0 and not staged.readers:
                    self._staging.release(staged.piece)
                staged.claims = 0
            links = offer.links
            takings = list(offer.claims.values())
            self._changed.notify_all()
        for link in links:
            link.close()
        self._ledger.end(
            offer.ticket.handoff,
            state,
            reason,
            tokens=max((max(taking.tokens.values(), default=0) for taking in takings), default=0),
            kv_bytes=sum(taking.moved for taking in takings),
            digest=sum(taking.total for taking in takings) & (1 << 64) - 1,
            resumed=sum(taking.resumed for taking in takings),
        )

    def _expire(self) -> None:
        """Ends what is past its time: handoffs at their deadline, and claims that nobody came back for."""
        while not self._closed:
            with self._changed:
                now = time.monotonic()
                late = [offer for offer in self._open.values() if offer.deadline <= now]
                lost = [
                    (offer, taking)
                    for offer in self._open.values()
                    for taking in offer.claims.values()
                    if taking.lost_until is not None and not taking.over
                ]
                gone = [(offer, taking) for offer, taking in lost if (taking.lost_until or 0) <= now]
                if not late and not gone and not self._closed:
                    times = [offer.deadline for offer in self._open.values()]
                    times += [taking.lost_until for _, taking in lost if taking.lost_until is not None]
                    self._changed.wait(min(times) - now if times else None)
            for offer in late:
                self._end(
                    offer,
                    "expired",
                    DeadlineExceeded("nobody fetched the KV cache before the ticket's deadline").reason(),
                )
            for offer, taking in gone:
                self._finish(offer, taking, taking.broke)


def _broken(failure: DeeplinkError, channel: ch.Channel) -> bool:
    """Whether the connection failed, rather than the claim. A consumer that has lost the channel withdraws its regions,
    which may be heard of before the channel's end is."""
    if isinstance(failure, Refused):
        return failure.field == "region"
    return isinstance(failure, PeerGone) and channel.broken


def _casts(group: Group, dtype: str) -> bool:
    return dtype == group.spec.dtype or between(group.spec.dtype, dtype) is not None
