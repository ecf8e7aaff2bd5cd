"""Receiving from one source: the connection to it, the claim, and the conversation about its chunks.

A load has one such conversation for each producer rank it takes from. It goes on over a new connection when the old one
breaks, from the first tokens that have not landed.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from deeplink.errors import DeadlineExceeded, DeeplinkError, PeerGone, ProtocolError, Reason
from deeplink.kvconnector.handoffs import channel as ch
from deeplink.kvconnector.handoffs.landing import Landings, Load, Taken, given_up
from deeplink.kvconnector.transport.base import Transport
from deeplink.kvconnector.transport.quarantine import Quarantine
from deeplink.kvconnector.transport.staging import Staging
from deeplink.kvconnector.wires.pool import Pool

FAREWELL_SECONDS = 1.0
DIAL_SECONDS = 10.0
"""For connecting and the exchange of contracts."""
RESUME_SECONDS = 30.0
"""How long a producer that cannot be reached any more is tried again."""
RETRY_SECONDS = 0.2
RESUMES = 8
"""Times that one conversation goes on after its connection broke without anything having landed in between."""
END_SECONDS = 2.0
"""How long a producer is waited for that has given all and does not say that it knows."""
CLAIM_BYTES = 8

Dial = Callable[[str, float], ch.Channel]
"""Opens a channel to a producer's rank, on which both sides agree. Raises Refused, PeerGone, …"""


@dataclass(slots=True, eq=False)
class Receiving:
    """What one load takes from one source, which is reached at `address`."""

    load: Load
    address: str
    channel: ch.Channel
    taken: tuple[Taken, ...]
    dial: Dial
    pool: Pool[ch.Channel]
    staging: Staging
    quarantine: Quarantine
    transports: Mapping[str, Transport]
    verify: bool
    landed: Callable[[Receiving], None]
    """Called when all that was wanted of this source is in its blocks, before `run` returns: what is left is to let the
    producer know, over a link that may be long."""
    _claim: bytes = field(default_factory=lambda: secrets.token_bytes(CLAIM_BYTES))
    _accepted: bool = False

    def run(self, *, kept: bool) -> None:
        """Claim and receive all of it. Raises what went wrong. `kept` says that the channel is from an earlier handoff
        and may have broken since."""
        tries = 0
        while True:
            landed, had_all = self._landed, self._complete
            try:
                self._attempt()
                return
            except DeeplinkError as exc:
                if had_all and not self.load.cancelled:
                    return
                if not isinstance(exc, PeerGone) or self.load.cancelled:
                    raise
                tries = 1 if self._landed > landed else tries + 1
                if tries > RESUMES:
                    raise
                # One that was kept may have been closed long ago, which says nothing of this handoff.
                with self.load.lock:
                    self.load.resumed += not kept
                kept = False
                cause = exc
            try:
                self._reconnect(cause)
            except DeeplinkError:
                if self._complete and not self.load.cancelled:
                    return
                raise

    @property
    def _landed(self) -> int:
        return sum(taken.covered for taken in self.taken)

    @property
    def _all_landed(self) -> bool:
        return self._accepted and all(taken.complete for taken in self.taken)

    @property
    def _complete(self) -> bool:
        """Whether all that was wanted is here. What may be missing then is the end of the conversation: worth a moment,
        so that the producer's account is right too, but the tokens are there whatever becomes of it."""
        return self._all_landed and not (self.load.order.first and self.load.first is None)

    @property
    def _deadline(self) -> float:
        return min(self.load.deadline, time.monotonic() + END_SECONDS) if self._complete else self.load.deadline

    # -- the connection --------------------------------------------------------------------------------------

    def _attempt(self) -> None:
        """One connection's worth. What has been staged but not landed when it ends is let go of."""
        healthy = False
        landings = Landings(
            self.load,
            self.taken,
            self.channel,
            self.transports[self.channel.agreement.transport],
            self.staging,
            self.quarantine,
            self.verify,
        )
        try:
            self._make_claim()
            healthy = self._converse(landings)
        except PeerGone as exc:
            if (reason := self.channel.last_words()) is not None:
                raise DeeplinkError.from_reason(reason) from exc
            raise
        except DeeplinkError as exc:
            farewell(self.channel, exc.reason())
            raise
        finally:
            landings.clear()
            # Under the lock: a cancel that comes now must not close a channel that another load may have taken.
            with self.load.lock:
                healthy = healthy and not self.load.cancelled
                self.load.channels.discard(self.channel)
            if healthy:
                self.pool.give(self.address, self.channel)
            else:
                self.channel.close()

    def _reconnect(self, cause: PeerGone) -> None:
        """A producer that refuses the connection is gone; one that does not answer, or whose answer breaks off, may be
        behind a broken link."""
        until = min(self._deadline, time.monotonic() + RESUME_SECONDS)
        self.pool.drop(self.address)
        while True:
            if self.load.cancelled:
                raise given_up()
            try:
                channel = self.dial(self.address, min(until, time.monotonic() + DIAL_SECONDS))
                break
            except (PeerGone, DeadlineExceeded) as exc:
                refused = isinstance(exc.__cause__, ConnectionRefusedError)
                if refused or time.monotonic() + RETRY_SECONDS >= until:
                    raise cause from None
                time.sleep(RETRY_SECONDS)
        self.adopt(channel)

    def adopt(self, channel: ch.Channel) -> None:
        """Go on over this channel. It is closed when the load has been given up."""
        self.channel = channel
        with self.load.lock:
            self.load.channels.add(channel)

    def _make_claim(self) -> None:
        if self.load.cancelled:
            raise given_up()
        order, agreed = self.load.order, self.channel.agreement
        for taken in self.taken:
            taken.announced = taken.covered
        parts = tuple(taken.part() for taken in self.taken)
        address = self.transports[agreed.transport].address
        claim = ch.Claim(
            order.ticket_text,
            self._claim,
            order.prompt,
            parts,
            agreed.transport,
            address,
            order.stop,
            self.verify,
            self.load.sample,
            order.first,
        )
        self.channel.send(claim, self._deadline)
        answer = self.channel.receive(self._deadline)
        if isinstance(answer, ch.Fail):
            raise DeeplinkError.from_reason(answer.reason)
        if not isinstance(answer, ch.Accept):
            raise ProtocolError(f"{type(answer).__name__} in answer to a claim")
        self._accepted = True

    # -- the conversation ------------------------------------------------------------------------------------

    def _converse(self, landings: Landings) -> bool:
        """False when all has landed, but the producer does not say that it knows."""
        while True:
            landings.grant()
            try:
                message = self.channel.receive(self._deadline)
            except DeadlineExceeded:
                if self._complete:
                    return False
                raise
            if isinstance(message, ch.Chunk):
                landings.announce(message)
            elif isinstance(message, ch.Sent):
                landings.arrive(message)
                if self._complete:
                    self.landed(self)
                self.channel.send(ch.Landed(message.index), self.load.deadline)
            elif isinstance(message, ch.End) and self._all_landed and not landings.pending:
                self._end(message)
                return True
            elif isinstance(message, ch.Fail):
                raise DeeplinkError.from_reason(message.reason)
            else:
                raise ProtocolError(f"{type(message).__name__} out of turn")

    def _end(self, message: ch.End) -> None:
        if self.load.order.first:
            if message.first is None:
                raise ProtocolError("the end of a handoff without the first token, which was asked for")
            self.load.first = message.first


def farewell(channel: ch.Channel, reason: Reason) -> None:
    # A peer that is gone already knows what the farewell would have told it.
    with contextlib.suppress(DeeplinkError):
        channel.send(ch.Quit(reason), time.monotonic() + FAREWELL_SECONDS)
