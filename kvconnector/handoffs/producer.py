"""The producer's side: gather finished prefill chunks into staging, and serve them to whoever holds the ticket.

| method   | called by                          | may block |
|----------|------------------------------------|-----------|
| open     | engine thread, first prefill step  | no        |
| fill     | engine thread, after each step     | no        |
| conclude | engine thread, after sampling      | no        |
| pump     | engine thread, after each step     | no        |
| lose     | engine thread, on preemption       | no        |
| settled  | engine thread, after the request   | no        |
| abort    | any thread                         | no        |
| stages   | the channel's thread of a watcher  | a moment  |
| serve    | the channel's thread of one claim  | yes, until the deadline |

Engine blocks are read only inside `fill` and `pump`, on the engine's own thread, so they can be freed, preempted or
reused the moment `settled` is true, whatever the peer does. Where they are on a device, both wait for what the engine
has put on its thread's current stream there, which must be what wrote the blocks or come after it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from deeplink.errors import CastRefused, DeeplinkError, HandoffError, LayoutError, Reason, TicketRefused
from deeplink.kvconnector.caches.group import Group
from deeplink.kvconnector.contracts.negotiate import STATE
from deeplink.kvconnector.handoffs import channel as ch
from deeplink.kvconnector.handoffs.admission import check_claim, check_quit
from deeplink.kvconnector.handoffs.first_token import FirstToken
from deeplink.kvconnector.handoffs.handoff import FINAL, Ledger
from deeplink.kvconnector.handoffs.offer import Offer, Staged
from deeplink.kvconnector.handoffs.offers import Offers, given_up
from deeplink.kvconnector.handoffs.serve import Serving
from deeplink.kvconnector.handoffs.ticket import Ticket, other_epoch
from deeplink.kvconnector.layouts.cast import between
from deeplink.kvconnector.relayout.plan import TILE, chunks
from deeplink.kvconnector.transport.base import Link, Transport
from deeplink.kvconnector.transport.staging import Piece, Staging
from deeplink.kvconnector.wires.pool import Pool

log = logging.getLogger(__name__)

SHARE = 8
"""A chunk that goes to several ranks takes at most one of so many parts of the staging."""


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
        tile = TILE * max((group.wire().token_bytes for group in groups), default=0)
        self._chunk_bytes = min(chunk_bytes, max(staging.capacity // 2, tile))
        heads = max((group.heads[1] - group.heads[0] for group in groups), default=1)
        self._largest = max(self._chunk_bytes, min(chunk_bytes * heads, staging.capacity // SHARE))
        self._kept_free = max(self._largest, tile)
        self._rank = rank
        self._offers = Offers(staging, ledger)

    @property
    def claims(self) -> int:
        """Claims that are being served now, or whose consumer may come back."""
        return self._offers.claims

    # -- engine thread ---------------------------------------------------------------------------------------

    def open(self, ticket: Ticket, prompt: bytes, tokens: int) -> None:
        """Begin a handoff of `tokens` tokens: those that the decode engine goes on from, which is the whole prompt or,
        for an engine that computes the last token itself, one less. Of a full cache it may load fewer; a state is that
        after so many tokens and after no others.

        Raises TicketRefused for another epoch, a known id, or one that was aborted before.
        """
        if ticket.producer != self._epoch:
            raise other_epoch(self._epoch, ticket.producer)
        self._offers.check(ticket.handoff)
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
        self._offers.add(offer)

    def fill(self, name: str, tables: Sequence[Sequence[int]], computed: int) -> None:
        """Prefill has now computed `computed` tokens; they are in the blocks of `tables`, one per cache group.

        Stages what fits. Raises LayoutError for tables that do not reach so far. Where there is a state, `computed` has
        to be what it is the state of, also when that is more than the handoff is of: once prefill has gone past its
        tokens the state they had is not in the blocks any more, and the handoff fails by that name.
        """
        offer = self._offers.get(name)
        if offer is not None:
            if len(tables) != len(self._groups):
                raise LayoutError(f"{len(tables)} block tables for {len(self._groups)} cache groups")
            offer.tables, offer.computed = tables, computed
            self._gather(offer)

    def conclude(self, name: str, first: FirstToken) -> None:
        """Prefill has sampled the first token: for the consumers that asked for it."""
        self._offers.conclude(name, first)

    def lose(self, name: str) -> None:
        """The blocks of the last `fill` are no longer this request's (preemption). What is staged stays good."""
        offer = self._offers.get(name)
        if offer is not None:
            offer.tables, offer.computed = (), 0

    def pump(self) -> None:
        """Stage what did not fit before."""
        for offer in self._offers.all():
            self._gather(offer)

    def settled(self, name: str) -> bool:
        """Whether the request's blocks are no longer needed: all is staged, or the handoff has ended."""
        offer = self._offers.get(name)
        return offer is None or offer.complete

    # -- any thread ------------------------------------------------------------------------------------------

    def abort(self, name: str, reason: Reason | None = None) -> None:
        """End a handoff. One that is not open yet will not be."""
        offer, record = self._offers.get(name), self._ledger.get(name)
        if offer is not None:
            self._offers.end(offer, "aborted", reason or given_up())
        elif record is None or (record.side == "producer" and record.state not in FINAL):
            self._offers.give_up(name)  # with a record there is an `open` just under way
        elif record.side == "producer":
            self._ledger.too_late()

    def stages(self, names: Sequence[str], known: Sequence[int]) -> tuple[int, ...]:
        """How far each of these handoffs is; waits a moment for one to be further than `known`."""
        return self._offers.stages(names, known)

    def close(self) -> None:
        """Abort what is open and close what is kept open."""
        self._offers.close()
        self._links.close()

    def serve(self, channel: ch.Channel, claim: ch.Claim, ticket: Ticket, consumer: str) -> None:
        """Serve one claim of the engine with epoch `consumer` to its end. Raises what is to be told to the consumer."""
        if ticket.producer != self._epoch:
            raise other_epoch(self._epoch, ticket.producer)
        if ticket.consumer != consumer:
            raise other_epoch(ticket.consumer, consumer)
        offers = self._offers
        offer = offers.wait_for(ticket, lambda deadline: check_quit(channel, deadline))
        taking = offers.admit(offer, claim, channel)
        # A claim counts however it ends: refused ones and bugs too, or the staging would be held until the deadline.
        first: FirstToken | None = None
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
                offers.changed,
            ).move()
            if claim.first:
                first = offers.wait_for_first(offer, lambda deadline: check_quit(channel, deadline))
            failure = None
        except DeeplinkError as exc:
            failure = exc
            raise
        finally:
            offers.leave(offer, taking, channel, failure)
        channel.send(ch.End(first), offer.deadline)

    # -- staging ---------------------------------------------------------------------------------------------

    def _gather(self, offer: Offer) -> None:
        """Stage what has been computed and fits, group by group."""
        if offer.complete or not offer.tables:
            return
        try:
            for index, group in enumerate(self._groups):
                if not self._gather_group(offer, index, group):
                    return
        except (CastRefused, HandoffError) as exc:
            # A value of this prompt does not fit, its device has no memory left to copy through, or its state is gone;
            # the engine and its other requests are in order.
            log.warning("deeplink handoff %s ends: %s", offer.ticket.handoff, exc)
            self._offers.end(offer, "failed", exc.reason())
            return
        if offer.complete:
            self._ledger.enter(offer.ticket.handoff, "staged")

    def _gather_group(self, offer: Offer, index: int, group: Group) -> bool:
        """False when staging is full or the handoff has ended."""
        start, stop = offer.marks[index], offer.ranges[index][1]
        limit = stop if offer.computed >= offer.tokens else min(stop, offer.computed) // TILE * TILE
        if start >= limit:
            return True
        if group.spec.kind == STATE and offer.computed > offer.tokens:
            raise HandoffError(
                f"the state after {offer.tokens} tokens was not staged before prefill had computed {offer.computed}",
                field="tokens",
                ours=str(offer.computed),
                theirs=str(offer.tokens),
                remedy="let the prefill engine compute as many tokens as the decode engine goes on from, and no more",
            )
        form = group.wire(offer.wire[index])
        for chunk in chunks(start, limit, self._chunk_of(offer, group) // form.token_bytes):
            piece = self._room(offer, form.length(chunk.tokens))
            if piece is None:
                return False
            staged, began = False, time.perf_counter()
            try:
                group.stage(offer.tables[index], chunk, self._staging.view(piece), form.dtype)
                staged = True
            finally:
                offer.converting += time.perf_counter() - began
                if not staged:
                    self._staging.release(piece)
            if not self._offers.stage(offer, Staged(index, chunk, piece)):
                return False
        return True

    def _chunk_of(self, offer: Offer, group: Group) -> int:
        """Bytes of a chunk, of which as many ranks as have heads of their own each take their part. A push is what the
        messages about it are made for: two of 4 MiB cost a tenth more than one of 8."""
        parts = min(offer.expected, group.heads[1] - group.heads[0])
        return min(self._chunk_bytes * max(parts, 1), self._largest)

    def _room(self, offer: Offer, length: int) -> Piece | None:
        """What nobody fetches yet leaves room for a chunk of what is being fetched. Else a decode engine could have
        given its last blocks to a handoff that waits for room here, while the room is that of one that waits for those
        blocks. The room is always at one place, so that it cannot be in pieces that are too small."""
        return self._staging.try_allocate(length, 0 if offer.claims else self._kept_free)


def _casts(group: Group, dtype: str) -> bool:
    return dtype == group.spec.dtype or between(group.spec.dtype, dtype) is not None
