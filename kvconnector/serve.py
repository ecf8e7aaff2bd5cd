"""Serving one claim: announce the chunks, push those that are granted a place, and let go of those that have landed.

It runs on the thread of the claim's channel and may block until the handoff's deadline. `Producer` owns the offer and
its end; what is shared with it is guarded by `changed`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from deeplink.errors import DeeplinkError, PeerGone, ProtocolError, Refused
from deeplink.kvconnector import channel as ch
from deeplink.kvconnector import digest, wire
from deeplink.kvconnector.cache import Cache
from deeplink.kvconnector.offer import Offer, Staged
from deeplink.kvconnector.pool import Pool
from deeplink.kvconnector.staging import Staging
from deeplink.kvconnector.transport.base import Link, Push, Transport

AHEAD = 3
"""Chunks announced before the first of them has landed."""
LOOK = 0.05
"""Seconds between two looks at what else may have happened while a consumer or prefill is waited for."""


@dataclass(frozen=True, slots=True)
class Serving:
    """One accepted claim of one offer."""

    offer: Offer
    channel: ch.Channel
    claim: ch.Claim
    cache: Cache
    staging: Staging
    links: Pool[Link]
    transports: Mapping[str, Transport]
    changed: threading.Condition

    def move(self) -> tuple[int, int, int]:
        """Announce, push and account every chunk that overlaps the claim; tokens, bytes and digest moved."""
        if self.claim.start == self.claim.stop:
            return 0, 0, 0
        peer = self.claim.transport, self.claim.address
        link = self.links.take(peer) or self._connect()
        with self.changed:
            self.offer.links.add(link)
        tokens = moved = total = 0
        waiting: deque[Staged] = deque()
        index, healthy = 0, False
        try:
            while True:
                while len(waiting) < AHEAD and (staged := self._next(index)) is not None:
                    index += 1
                    if staged.chunk.stop <= self.claim.start:
                        self._landed(staged)
                        continue
                    if staged.digests is None:
                        staged.digests = self._digest(staged)
                    waiting.append(staged)
                    self.channel.send(
                        ch.Chunk(
                            index - 1,
                            staged.chunk.start,
                            staged.chunk.stop,
                            staged.piece.length,
                            staged.digests.tobytes(),
                        ),
                        self.offer.deadline,
                    )
                    tokens += staged.chunk.tokens
                    moved += staged.piece.length
                    total += digest.total(staged.digests)
                if not waiting:
                    if index and self.offer.staged[index - 1].chunk.stop >= self.claim.stop:
                        healthy = True
                        return tokens, moved, total & 0xFFFF_FFFF_FFFF_FFFF
                    self._await_chunk(index)
                    continue
                self._answer(self._hear(), waiting, link)
        except DeeplinkError as exc:
            # When the handoff was ended from elsewhere, the broken link is the consequence, not the cause.
            if self.offer.ended is not None:
                raise DeeplinkError.from_reason(self.offer.ended) from exc
            # The consumer says farewell and withdraws its regions; a push that breaks tells less than the farewell.
            if isinstance(exc, (PeerGone, Refused)) and (reason := self.channel.last_words()) is not None:
                raise DeeplinkError.from_reason(reason) from exc
            raise
        finally:
            with self.changed:
                self.offer.links.discard(link)
                # `_end` closes the links it has found here, so one it may have seen is not kept for others.
                healthy = healthy and self.offer.ended is None
            if healthy:
                self.links.give(peer, link)
            else:
                link.close()
                self.links.drop(peer)

    def _connect(self) -> Link:
        try:
            return self.transports[self.claim.transport].connect(self.claim.address, self.offer.deadline)
        except PeerGone as exc:
            # A consumer that shuts down says so on the channel, and its transport is gone at the same moment.
            if (reason := self.channel.last_words()) is not None:
                raise DeeplinkError.from_reason(reason) from exc
            raise

    def _next(self, index: int) -> Staged | None:
        with self.changed:
            if self.offer.ended is not None:
                raise DeeplinkError.from_reason(self.offer.ended)
            if index < len(self.offer.staged) and self.offer.staged[index].chunk.start < self.claim.stop:
                return self.offer.staged[index]
            return None

    def _await_chunk(self, index: int) -> None:
        with self.changed:
            if index >= len(self.offer.staged) and self.offer.ended is None:
                self.changed.wait(LOOK)
        check_quit(self.channel, self.offer.deadline)

    def _answer(self, message: ch.Message, waiting: deque[Staged], link: Link) -> None:
        if isinstance(message, ch.Quit):
            raise DeeplinkError.from_reason(message.reason)
        if isinstance(message, ch.Grant):
            for staged in waiting:
                if self.offer.staged[message.index : message.index + 1] == [staged]:
                    self._push(staged, message.key, link)
                    self.channel.send(ch.Sent(message.index), self.offer.deadline)
                    return
        if isinstance(message, ch.Landed) and self.offer.staged[message.index : message.index + 1] == [waiting[0]]:
            self._landed(waiting.popleft())
            return
        raise ProtocolError(f"{type(message).__name__} out of turn")

    def _push(self, staged: Staged, key: bytes, link: Link) -> None:
        with self.changed:
            if self.offer.ended is not None:
                raise DeeplinkError.from_reason(self.offer.ended)
            staged.readers += 1
        try:
            link.push([Push(self.staging.view(staged.piece), key, 0)], self.offer.deadline)
        finally:
            with self.changed:
                staged.readers -= 1
                if self.offer.ended is not None and not staged.readers:
                    self.staging.release(staged.piece)

    def _digest(self, staged: Staged) -> digest.Tiles:
        # Should the handoff end meanwhile, the piece may be another's already; then the number is never used.
        wire_LSHTD = self.staging.array(staged.piece, self.cache.dtype, self.cache.wire_shape(staged.chunk.tokens))
        return digest.tiles(staged.chunk, wire_LSHTD)

    def _landed(self, staged: Staged) -> None:
        with self.changed:
            staged.claims -= 1
            if staged.claims == 0 and not staged.readers:
                self.staging.release(staged.piece)

    def _hear(self) -> ch.Message:
        """What the consumer says next. It may be long silent, waiting for room, so the end is looked for too."""
        while not self.channel.readable(LOOK):
            if self.offer.ended is not None:
                raise DeeplinkError.from_reason(self.offer.ended)
            wire.remaining(self.offer.deadline)
        return self.channel.receive(self.offer.deadline)


def check_claim(offer: Offer, claim: ch.Claim, transport: str) -> None:
    """Raises what keeps this claim from being served: another transport, another prompt, tokens that are not there."""
    if claim.transport != transport:
        raise Refused(
            "the claim is for another transport than agreed", field="transport", ours=transport, theirs=claim.transport
        )
    if claim.prompt != offer.prompt:
        raise Refused(
            "the two engines do not have the same prompt",
            field="prompt",
            ours=offer.prompt.hex(),
            theirs=claim.prompt.hex(),
            remedy="serve the same tokenizer and chat template on both engines",
        )
    if not claim.start <= claim.stop <= offer.tokens:
        raise ProtocolError(f"tokens [{claim.start}, {claim.stop}) of a prompt of {offer.tokens}")


def check_quit(channel: ch.Channel, deadline: float) -> None:
    """While nothing is expected from the consumer, anything that comes is its farewell."""
    if channel.readable(0):
        message = channel.receive(deadline)
        if isinstance(message, ch.Quit):
            raise DeeplinkError.from_reason(message.reason)
        raise ProtocolError(f"{type(message).__name__} out of turn")
