"""The open handoffs of a producer: who claims each, who comes back for it, and how it ends.

A claim whose connection breaks is not over: its consumer has a short time to come back for what it has not verified
yet. A connection that the peer's side has closed is given less time than one that has gone silent.

Everything here may be called from any thread. `changed` guards all offers, and is notified of whatever somebody may be
waiting for; nothing that can block is done under it.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from deeplink.errors import Aborted, DeadlineExceeded, DeeplinkError, LinkLost, PeerGone, Reason, Refused, TicketRefused
from deeplink.kvconnector.handoffs import channel as ch
from deeplink.kvconnector.handoffs.admission import check_resumed
from deeplink.kvconnector.handoffs.first_token import FirstToken
from deeplink.kvconnector.handoffs.handoff import BEGUN, COMPLETE, FINAL, KEPT, NOT_BEGUN, Ledger
from deeplink.kvconnector.handoffs.offer import Offer, Staged, Taking, let_go, release
from deeplink.kvconnector.handoffs.ticket import Ticket
from deeplink.kvconnector.transport.staging import Staging

CLOSED_SECONDS = 1.0
LOST_SECONDS = 30.0
"""How long a claim whose connection was closed, or has gone silent, is kept for its consumer to come back."""
LET_GO_SECONDS = 5.0
LOOK = 0.05
"""Seconds between two looks at what else may have happened while prefill is waited for."""


class Offers:
    """Ends what is past its time in a thread of its own, until it is closed."""

    def __init__(self, staging: Staging, ledger: Ledger) -> None:
        self._staging = staging
        self._ledger = ledger
        self._open: dict[str, Offer] = {}
        self._given_up: OrderedDict[str, None] = OrderedDict()
        self._closed = False
        lock = threading.RLock()
        self.changed = threading.Condition(lock)
        self._sooner = threading.Condition(lock)
        """For the thread that ends things: something may be due before what it waits for. Waking it for every chunk
        would cost as much as a chunk's messages."""
        threading.Thread(target=self._expire, name="deeplink-expiry", daemon=True).start()

    @property
    def claims(self) -> int:
        """Claims that are being served now, or whose consumer may come back."""
        with self.changed:
            return sum(len(offer.claims) - offer.served for offer in self._open.values())

    def get(self, name: str) -> Offer | None:
        return self._open.get(name)

    def all(self) -> list[Offer]:
        with self.changed:
            return list(self._open.values())

    def give_up(self, name: str) -> None:
        """Nobody wants this handoff any more. One that is not open yet will not be: its client may leave while the
        request still waits for the engine's attention, and what is staged then would be held until the deadline."""
        with self.changed:
            offer = self._open.get(name)
            if offer is None:
                self._given_up[name] = None
                if len(self._given_up) > KEPT:
                    self._given_up.popitem(last=False)
                self.changed.notify_all()
        if offer is not None:
            self.end(offer, "aborted", given_up())

    def check(self, name: str) -> None:
        """Raises TicketRefused for one that was given up before it was opened."""
        if name in self._given_up:
            raise TicketRefused("this handoff was given up before prefill began", field="handoff", theirs=name)

    def add(self, offer: Offer) -> None:
        """The ledger must know it already."""
        with self.changed:
            self._open[offer.ticket.handoff] = offer
            closed, unwanted = self._closed, offer.ticket.handoff in self._given_up
            self.changed.notify_all()
            self._sooner.notify_all()
        if closed:  # nobody would end it any more
            self.end(offer, "aborted", shut_down())
        elif unwanted:
            self.end(offer, "aborted", given_up())
        elif offer.expected == 0:  # other ranks hold the same heads, and all come to those
            self.end(offer, "drained", None)

    def stage(self, offer: Offer, staged: Staged) -> bool:
        """One more chunk for the claims that are not over. False, and its piece is free, when the handoff has ended."""
        with self.changed:
            if offer.ended is not None:
                self._staging.release(staged.piece)
                return False
            staged.claims = offer.expected - offer.served
            offer.staged.append(staged)
            offer.marks[staged.group] = staged.chunk.stop
            self.changed.notify_all()
            return True

    def conclude(self, name: str, first: FirstToken) -> None:
        with self.changed:
            if (offer := self._open.get(name)) is not None:
                offer.first = first
                self.changed.notify_all()

    def wait_for_first(self, offer: Offer, look: Callable[[float], None]) -> FirstToken:
        """The first token, once prefill has sampled it, at most until the handoff ends. `look` is as in `wait_for`."""
        while True:
            with self.changed:
                if offer.ended is not None:
                    raise DeeplinkError.from_reason(offer.ended)
                if offer.first is not None:
                    return offer.first
                self.changed.wait(LOOK)
            look(offer.deadline)

    def close(self) -> None:
        """End what is open; what comes later ends at once."""
        with self.changed:
            self._closed = True
            offers = list(self._open.values())
            self.changed.notify_all()
            self._sooner.notify_all()
        for offer in offers:
            self.end(offer, "aborted", shut_down())

    # -- claims ----------------------------------------------------------------------------------------------

    def wait_for(self, ticket: Ticket, look: Callable[[float], None]) -> Offer:
        """The handoff, once the engine has opened it: a claim may come before prefill starts. `look` is called every
        now and then, with the deadline, and may raise."""
        deadline = time.monotonic() + ticket.milliseconds / 1000
        while True:
            with self.changed:
                offer = self._open.get(ticket.handoff)
                if offer is not None:
                    return offer
                self.check(ticket.handoff)
                record = self._ledger.get(ticket.handoff)
                if record is None or record.state not in FINAL:
                    # One that is not final belongs to an `open` or an `end` that is just under way.
                    self.changed.wait(LOOK)
                    record = None
            if record is not None:
                self._ledger.too_late()
                if record.reason is not None:
                    raise DeeplinkError.from_reason(record.reason)
                raise TicketRefused("this handoff has ended", field="handoff", theirs=record.state)
            if time.monotonic() > deadline:
                raise DeadlineExceeded("prefill did not start before the deadline")
            look(deadline)

    def admit(self, offer: Offer, claim: ch.Claim, channel: ch.Channel) -> Taking:
        """A new claim, or one that comes back after its connection broke and takes over from that."""
        with self.changed:
            taking = offer.claims.get(claim.claim)
            if taking is None:
                if len(offer.claims) >= offer.expected:
                    raise TicketRefused(
                        "this handoff has been claimed already", field="claims", ours=str(offer.expected)
                    )
                taking = offer.claims[claim.claim] = Taking(claim.parts, channel=channel)
                return taking
            # One that is refused here leaves the claim as it is, and the connection that it is served on.
            check_resumed(taking.parts, claim.parts)
            old, link = taking.channel, taking.link
        # It may be asleep on a connection that is dead; closing that wakes it.
        for connection in (old, link):
            if connection is not None:
                connection.close()
        with self.changed:
            self.changed.wait_for(lambda: taking.channel is None, LET_GO_SECONDS)
            if taking.over:
                self._ledger.too_late()
                raise TicketRefused("this claim is over", field="claim", theirs=claim.claim.hex())
            if taking.channel is not None:
                raise TicketRefused("this claim is being served already", field="claim", theirs=claim.claim.hex())
            check_resumed(taking.parts, claim.parts)
            taking.channel, taking.lost_until, taking.parts = channel, None, claim.parts
            taking.resumed += 1
            return taking

    def leave(self, offer: Offer, taking: Taking, channel: ch.Channel, failure: DeeplinkError | None) -> None:
        """The claim is no longer served on this channel: because it is over, or because the connection broke."""
        with self.changed:
            taking.channel = None
            broken = offer.ended is None and failure is not None and _broken(failure, channel)
            if broken:
                seconds = LOST_SECONDS if isinstance(failure, LinkLost) else CLOSED_SECONDS
                taking.broke = failure
                taking.lost_until = min(offer.deadline, time.monotonic() + seconds)
                self._sooner.notify_all()
            else:
                self._account(offer, taking)
            self.changed.notify_all()
        if not broken:
            self._last(offer, failure)

    def _account(self, offer: Offer, taking: Taking) -> None:
        """The claim is over: let go of what it has not fetched. Under the lock, once for each claim."""
        taking.over = True
        taking.lost_until = None
        offer.served += 1
        if offer.ended is not None:
            self._ledger.too_late()
            return
        for staged in offer.staged[taking.done :]:
            release(staged, self._staging)

    def _last(self, offer: Offer, failure: DeeplinkError | None) -> None:
        """The end of the last claim is that of the handoff."""
        if offer.served < offer.expected or offer.ended is not None:
            return
        if failure is None:
            self.end(offer, "drained", None)
        else:
            states: dict[type[DeeplinkError], str] = {Aborted: "aborted", DeadlineExceeded: "expired"}
            self.end(offer, states.get(type(failure), "failed"), failure.reason())

    # -- for those that will claim ---------------------------------------------------------------------------

    def stages(self, names: Sequence[str], known: Sequence[int]) -> tuple[int, ...]:
        """How far each of these is (`handoff.BEGUN` and its like), once one is further than `known`, or after LOOK."""
        with self.changed:
            self.changed.wait_for(lambda: any(map(int.__gt__, map(self._stage, names), known)), LOOK)
            return tuple(map(self._stage, names))

    def _stage(self, name: str) -> int:
        offer = self._open.get(name)
        if offer is not None:
            # Not when all is staged: for that there may be no room before somebody has fetched a part of it.
            if offer.computed >= offer.tokens or offer.complete:
                return COMPLETE
            return BEGUN if offer.staged else NOT_BEGUN
        record = self._ledger.get(name)
        return COMPLETE if record is not None and record.state in FINAL else NOT_BEGUN

    # -- the end ---------------------------------------------------------------------------------------------

    def end(self, offer: Offer, state: str, reason: Reason | None) -> None:
        """Once; who comes second changes nothing."""
        with self.changed:
            if self._open.pop(offer.ticket.handoff, None) is None:
                self._ledger.too_late()
                return
            offer.ended = reason or Reason(state, f"the handoff has {state}")
            for staged in offer.staged:
                let_go(staged, self._staging)
            links = offer.links
            takings = list(offer.claims.values())
            self._ledger.end(
                offer.ticket.handoff,
                state,
                reason,
                tokens=max((max(taking.tokens.values(), default=0) for taking in takings), default=0),
                kv_bytes=sum(taking.moved for taking in takings),
                digest=_digest(takings),
                resumed=sum(taking.resumed for taking in takings),
                converting=offer.converting,
                early=sum(taking.early for taking in takings),
            )
            self.changed.notify_all()
        for link in links:
            link.close()

    def _expire(self) -> None:
        """Ends what is past its time: handoffs at their deadline, and claims that nobody came back for."""
        while not self._closed:
            with self.changed:
                now = time.monotonic()
                offers = list(self._open.values())
                late = [offer for offer in offers if offer.deadline <= now]
                lost = [
                    (taking.lost_until, offer, taking)
                    for offer in offers
                    for taking in offer.claims.values()
                    if taking.lost_until is not None
                ]
                gone = [(offer, taking) for until, offer, taking in lost if until <= now]
                if not late and not gone and not self._closed:
                    times = [offer.deadline for offer in offers] + [until for until, _, _ in lost]
                    self._sooner.wait(min(times) - now if times else None)
            for offer in late:
                why = DeadlineExceeded("nobody fetched the KV cache before the ticket's deadline")
                self.end(offer, "expired", why.reason())
            for offer, taking in gone:
                self._give_up(offer, taking)

    def _give_up(self, offer: Offer, taking: Taking) -> None:
        with self.changed:
            # It may have come back since we looked.
            if taking.lost_until is None or taking.lost_until > time.monotonic():
                return
            self._account(offer, taking)
            failure = taking.broke
        self._last(offer, failure)


def given_up() -> Reason:
    return Aborted("the prefill request was given up").reason()


def shut_down() -> Reason:
    return Aborted("the engine shuts down").reason()


def _broken(failure: DeeplinkError, channel: ch.Channel) -> bool:
    """Whether the connection failed, rather than the claim. A consumer that has lost the channel withdraws its regions,
    which may be heard of before the channel's end is."""
    if isinstance(failure, Refused):
        return failure.field == "region"
    return isinstance(failure, PeerGone) and channel.broken


def _digest(takings: Sequence[Taking]) -> int | None:
    """Of all that was moved; None when somebody took it without digests."""
    if not all(taking.digested for taking in takings):
        return None
    return sum(taking.total for taking in takings) & (1 << 64) - 1
