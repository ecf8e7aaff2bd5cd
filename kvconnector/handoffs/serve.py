"""Serving one claim: announce the chunks, push those that are granted a place, and let go of those that have landed.

It runs on the thread of the claim's channel and may block until the handoff's deadline. `Offers` owns the offer and
its end; what is shared with it is guarded by `changed`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deeplink.errors import DeeplinkError, PeerGone, ProtocolError, Refused
from deeplink.kvconnector.caches.group import Group, Wire
from deeplink.kvconnector.handoffs import channel as ch
from deeplink.kvconnector.handoffs.admission import check_quit
from deeplink.kvconnector.handoffs.offer import Announced, Offer, Staged, Taking, release
from deeplink.kvconnector.handoffs.pushing import POSTS, Pushing
from deeplink.kvconnector.relayout import digest
from deeplink.kvconnector.transport.base import Link, Push, Transport
from deeplink.kvconnector.transport.staging import Staging
from deeplink.kvconnector.wires import wire
from deeplink.kvconnector.wires.pool import Pool

AHEAD = 3 * POSTS
"""Chunks announced before the first of them has landed: those that are under way, as many that are granted a place, and
as many of which the consumer and this side tell each other."""
LOOK = 0.05
"""Seconds between two looks at what else may have happened while a consumer or prefill is waited for."""
_MASK = (1 << 64) - 1


@dataclass(slots=True)
class Serving:
    """One accepted claim of one offer, for as long as its channel holds."""

    offer: Offer
    taking: Taking
    channel: ch.Channel
    claim: ch.Claim
    groups: Sequence[Group]
    staging: Staging
    links: Pool[Link]
    transports: Mapping[str, Transport]
    changed: threading.Condition
    _pushing: Pushing = field(init=False)
    _waiting: deque[Announced] = field(default_factory=deque)
    _granted: deque[ch.Grant] = field(default_factory=deque)
    """What may be pushed now."""
    _number: int = 0

    def __post_init__(self) -> None:
        peer = self.claim.transport, self.claim.address
        self._pushing = Pushing(
            self.offer, self.taking, peer, self._connect, self._current, self.staging, self.links, self.changed
        )

    def move(self) -> None:
        """Announce, push and account every chunk that overlaps the claim. Returns when all of it has landed."""
        self._recount()
        if not any(part.start < part.stop for part in self.claim.parts):
            return
        covered = [part.start for part in self.claim.parts]
        index, healthy = self.taking.done, False
        try:
            self._pushing.open()
            while True:
                self._listen()
                if self._announced() < AHEAD and (staged := self._next(index)) is not None:
                    index += 1
                    self._announce(staged, covered)
                    if not self._granted:
                        continue
                if not self._waiting:
                    if all(at >= part.stop for at, part in zip(covered, self.claim.parts, strict=True)):
                        healthy = True
                        return
                    self._await_chunk(index)
                elif self._pushing.full or (self._pushing.under_way and not self._granted):
                    self.channel.send(ch.Sent(self._pushing.arrived().number), self.offer.deadline)
                elif self._granted:
                    self._push(self._granted.popleft())
                else:
                    self._answer(self._hear())
        except DeeplinkError as exc:
            # When the handoff was ended from elsewhere, the broken link is the consequence, not the cause.
            if self.offer.ended is not None:
                raise DeeplinkError.from_reason(self.offer.ended) from exc
            # The consumer says farewell and withdraws its regions; a push that breaks tells less than the farewell.
            if isinstance(exc, (PeerGone, Refused)) and (reason := self.channel.last_words()) is not None:
                raise DeeplinkError.from_reason(reason) from exc
            if isinstance(exc, Refused) and self.channel.broken:
                raise PeerGone("the connection to the consumer broke") from exc
            raise
        finally:
            self.taking.flying = [one for one in self._waiting if not one.landed]
            self._pushing.close(healthy)

    # -- one chunk -------------------------------------------------------------------------------------------

    def _announced(self) -> int:
        return sum(not one.landed for one in self._waiting)

    def _next(self, index: int) -> Staged | None:
        with self.changed:
            if self.offer.ended is not None:
                raise DeeplinkError.from_reason(self.offer.ended)
            return self.offer.staged[index] if index < len(self.offer.staged) else None

    def _announce(self, staged: Staged, covered: list[int]) -> None:
        """Tell the consumer of each part of a chunk that it wants. `covered` is how far each part is announced."""
        chunk = staged.chunk
        wanted = [
            place
            for place, part in enumerate(self.claim.parts)
            if part.group == staged.group and chunk.start < part.stop and covered[place] < min(chunk.stop, part.stop)
        ]
        if not wanted:
            self._waiting.append(Announced(staged, True, landed=True))
            self._settle()
            return
        form = self._form(staged)
        digests = self._digests(staged, form) if self.claim.verify else None
        for place in wanted:
            part = _wire(form, self.claim.parts[place])
            tiles = form.part_of(digests, part) if digests is not None else None
            one = Announced(staged, place == wanted[-1], self._number, place, tiles, part.length(chunk.tokens))
            self._number += 1
            self._waiting.append(one)
            self.channel.send(
                ch.Chunk(
                    one.number, place, chunk.start, chunk.stop, one.length, b"" if tiles is None else tiles.tobytes()
                ),
                self.offer.deadline,
            )
            covered[place] = chunk.stop

    def _listen(self) -> None:
        """Take in all that has come. To send a chunk over a slow link takes longer than what it is told meanwhile to
        come and go: whatever lets another chunk be announced must not wait for that, or the link stands idle later."""
        while self.channel.readable(0):
            self._answer(self.channel.receive(self.offer.deadline))

    def _push(self, grant: ch.Grant) -> None:
        for one in self._waiting:
            if one.number == grant.index and not one.landed:
                one.early = self.offer.computed < self.offer.tokens
                self._pushing.post(one, self._pushes(one, grant.key))
                return
        raise ProtocolError(f"a grant for chunk {grant.index} out of turn")

    def _answer(self, message: ch.Message) -> None:
        if isinstance(message, ch.Quit):
            raise DeeplinkError.from_reason(message.reason)
        if isinstance(message, ch.Grant):
            self._granted.append(message)
            return
        if isinstance(message, ch.Landed):
            first = next((one for one in self._waiting if not one.landed), None)
            if first is not None and first.number == message.index:
                first.landed = True
                self._count(first)
                self._settle()
                return
        raise ProtocolError(f"{type(message).__name__} out of turn")

    def _recount(self) -> None:
        """Of what was under way when the last connection broke, this claim says what has landed all the same."""
        flying, self.taking.flying = self.taking.flying, []
        for one in flying:
            part = self.claim.parts[one.part]
            if min(one.staged.chunk.stop, part.stop) <= part.start:
                self._count(one)

    def _count(self, one: Announced) -> None:
        taking, chunk = self.taking, one.staged.chunk
        taking.tokens[one.part] = taking.tokens.get(one.part, 0) + chunk.tokens
        taking.moved += one.length
        taking.early += one.length * one.early
        if one.digests is None:
            taking.digested = False
        else:
            taking.total = (taking.total + digest.total(one.digests)) & _MASK

    def _pushes(self, one: Announced, key: bytes) -> Sequence[Push]:
        tokens = one.staged.chunk.tokens
        form = self._form(one.staged)
        view = self.staging.view(one.staged.piece)
        pushes, offset = [], 0
        for start, stop in form.pieces(_wire(form, self.claim.parts[one.part]), tokens):
            pushes.append(Push(view[start:stop], key, offset))
            offset += stop - start
        return pushes

    def _form(self, staged: Staged) -> Wire:
        return self.groups[staged.group].wire(self.offer.wire[staged.group])

    def _digests(self, staged: Staged, form: Wire) -> digest.Tiles:
        """Of the sample that the claim asks for; kept for another claim that asks for the same, even at once."""
        sample = self.claim.sample
        with staged.digesting:
            kept = staged.digests
            if kept is None or kept[0] != sample:
                kept = staged.digests = sample, self._digest(staged, form)
        return kept[1]

    def _digest(self, staged: Staged, form: Wire) -> digest.Tiles:
        # Should the handoff end meanwhile, the piece may be another's already; then the number is never used.
        return form.digests(staged.chunk, self.staging.view(staged.piece), self.claim.sample)

    def _settle(self) -> None:
        """Let go of the chunks, in order, of which everything that was wanted has landed."""
        with self.changed:
            while self._waiting and self._waiting[0].landed:
                one = self._waiting.popleft()
                if one.last:
                    self.taking.done += 1
                    release(one.staged, self.staging)

    def _connect(self) -> Link:
        try:
            return self.transports[self.claim.transport].connect(self.claim.address, self.offer.deadline)
        except PeerGone as exc:
            # A consumer that shuts down says so on the channel, and its transport is gone at the same moment.
            if (reason := self.channel.last_words()) is not None:
                raise DeeplinkError.from_reason(reason) from exc
            raise

    def _current(self) -> bool:
        return self.taking.channel is self.channel and not self.channel.ended()

    # -- waiting ---------------------------------------------------------------------------------------------

    def _await_chunk(self, index: int) -> None:
        with self.changed:
            if index >= len(self.offer.staged) and self.offer.ended is None:
                self.changed.wait(LOOK)
        check_quit(self.channel, self.offer.deadline)

    def _hear(self) -> ch.Message:
        """What the consumer says next. It may be long silent, waiting for room, so the end is looked for too."""
        while not self.channel.readable(LOOK):
            if self.offer.ended is not None:
                raise DeeplinkError.from_reason(self.offer.ended)
            wire.remaining(self.offer.deadline)
        return self.channel.receive(self.offer.deadline)


def _wire(form: Wire, part: ch.Part) -> Wire:
    return form.part(part.layers, part.heads)
