"""Receiving from one source: give each announced chunk a place, verify what has arrived, and scatter it into blocks.

A load has one such conversation for each producer rank it takes from. It goes on over a new connection when the old one
breaks, from the first tokens that have not landed.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from deeplink.errors import (
    Aborted,
    DeadlineExceeded,
    DeeplinkError,
    DigestMismatch,
    LinkLost,
    PeerGone,
    ProtocolError,
    Reason,
)
from deeplink.kvconnector import channel as ch
from deeplink.kvconnector import digest
from deeplink.kvconnector.group import Group, Wire
from deeplink.kvconnector.order import Order
from deeplink.kvconnector.plan import Chunk
from deeplink.kvconnector.pool import Pool
from deeplink.kvconnector.quarantine import Quarantine
from deeplink.kvconnector.shares import Share
from deeplink.kvconnector.staging import Piece, Staging
from deeplink.kvconnector.transport.base import Region, Transport

LOOK = 0.05
"""Seconds between two looks at the channel while waiting for room."""
FAREWELL_SECONDS = 1.0
DIAL_SECONDS = 10.0
"""For connecting and the exchange of contracts."""
RESUME_SECONDS = 30.0
"""How long a producer that cannot be reached any more is tried again."""
RETRY_SECONDS = 0.2
RESUMES = 8
"""Times that one conversation goes on after its connection broke without anything having landed in between."""
CLAIM_BYTES = 8
_MASK = (1 << 64) - 1

Dial = Callable[[str, float], ch.Channel]
"""Opens a channel to a producer's rank, on which both sides agree. Raises Refused, PeerGone, …"""


def given_up() -> Aborted:
    return Aborted("the decode request was given up")


@dataclass(slots=True, eq=False)
class Load:
    """One order while it is carried out. `writing` is held while blocks are written, and to set `over`: after that none
    is. `channels` are those in use, guarded by `lock`."""

    order: Order
    deadline: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    channels: set[ch.Channel] = field(default_factory=set)
    cancelled: bool = False
    writing: threading.Lock = field(default_factory=threading.Lock)
    over: bool = False
    moved: int = 0
    total: int = 0
    resumed: int = 0
    tokens: dict[int, int] = field(default_factory=dict)
    """How many tokens have landed, of each share."""


@dataclass(slots=True)
class Landing:
    """A chunk that was announced: first without, then with a place in staging the peer may push to."""

    message: ch.Chunk
    piece: Piece | None = None
    region: Region | None = None


@dataclass(slots=True, eq=False)
class Taken:
    """A share of the cache and how far it has come: tokens before `covered` have landed, up to `stop` they shall.

    `number` tells the shares of one load apart.
    """

    number: int
    share: Share
    group: Group
    table: Sequence[int]
    wire: Wire
    covered: int
    stop: int
    announced: int = 0

    def part(self) -> ch.Part:
        return ch.Part(self.share.ours, self.share.layers, self.share.heads, self.covered, self.stop)


@dataclass(slots=True)
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
    _claim: bytes = field(default_factory=lambda: secrets.token_bytes(CLAIM_BYTES))
    _landings: dict[int, Landing] = field(default_factory=dict)
    _waiting: deque[int] = field(default_factory=deque)

    def run(self, *, kept: bool) -> None:
        """Claim and receive all of it. Raises what went wrong. `kept` says that the channel is from an earlier handoff
        and may have broken since."""
        tries = 0
        while True:
            landed = self.load.moved
            try:
                self._attempt()
                return
            except PeerGone as exc:
                if self.load.cancelled:
                    raise
                tries = 1 if self.load.moved > landed else tries + 1
                if tries > RESUMES:
                    raise
                # One that was kept may have been closed long ago, which says nothing of this handoff.
                self.load.resumed += not kept
                kept = False
                self._reconnect(exc)

    # -- the connection --------------------------------------------------------------------------------------

    def _attempt(self) -> None:
        """One connection's worth. What has been staged but not landed when it ends is let go of."""
        healthy = False
        try:
            self._make_claim()
            self._converse()
            healthy = True
        except PeerGone as exc:
            if (reason := self.channel.last_words()) is not None:
                raise DeeplinkError.from_reason(reason) from exc
            raise
        except DeeplinkError as exc:
            farewell(self.channel, exc.reason())
            raise
        finally:
            for landing in self._landings.values():
                self._clear(landing)
            self._landings.clear()
            self._waiting.clear()
            # Under the lock: a cancel that comes now must not close a channel that another load may have taken.
            with self.load.lock:
                healthy = healthy and not self.load.cancelled
                self.load.channels.discard(self.channel)
            if healthy:
                self.pool.give(self.address, self.channel)
            else:
                self.channel.close()

    def _reconnect(self, cause: PeerGone) -> None:
        """A producer that refuses the connection is gone; one that does not answer may be behind a broken link."""
        until = min(self.load.deadline, time.monotonic() + RESUME_SECONDS)
        self.pool.drop(self.address)
        while True:
            if self.load.cancelled:
                raise given_up()
            try:
                channel = self.dial(self.address, min(until, time.monotonic() + DIAL_SECONDS))
                break
            except (LinkLost, DeadlineExceeded):
                if time.monotonic() + RETRY_SECONDS >= until:
                    raise cause from None
                time.sleep(RETRY_SECONDS)
            except PeerGone:
                raise cause from None
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
        claim = ch.Claim(order.ticket_text, self._claim, order.prompt, parts, agreed.transport, address)
        self.channel.send(claim, self.load.deadline)
        answer = self.channel.receive(self.load.deadline)
        if isinstance(answer, ch.Fail):
            raise DeeplinkError.from_reason(answer.reason)
        if not isinstance(answer, ch.Accept):
            raise ProtocolError(f"{type(answer).__name__} in answer to a claim")

    # -- the conversation ------------------------------------------------------------------------------------

    def _converse(self) -> None:
        deadline = self.load.deadline
        while True:
            self._grant()
            message = self.channel.receive(deadline)
            if isinstance(message, ch.Chunk):
                self._check(message)
                self._landings[message.index] = Landing(message)
                self._waiting.append(message.index)
            elif isinstance(message, ch.Sent) and (landing := self._landings.get(message.index)) and landing.region:
                self._land(landing)
                self._clear(self._landings.pop(message.index))
                self.channel.send(ch.Landed(message.index), deadline)
            elif isinstance(message, ch.End) and not self._landings and all(t.covered >= t.stop for t in self.taken):
                return
            elif isinstance(message, ch.Fail):
                raise DeeplinkError.from_reason(message.reason)
            else:
                raise ProtocolError(f"{type(message).__name__} out of turn")

    def _check(self, message: ch.Chunk) -> None:
        """The chunks of a part come in order, each starting where the last ended (the first may begin before what is
        missing)."""
        if message.part >= len(self.taken):
            raise ProtocolError(f"a chunk of part {message.part} of {len(self.taken)}")
        taken = self.taken[message.part]
        length = taken.wire.length(max(0, message.stop - message.start))
        in_order = message.start <= taken.announced < message.stop
        if not in_order or message.length != length or message.index in self._landings:
            raise ProtocolError(
                f"a chunk of tokens [{message.start}, {message.stop}) with {message.length} bytes, "
                f"when token {taken.announced} was next and {length} bytes are right"
            )
        if len(message.digests) % 8:
            raise ProtocolError(f"{len(message.digests)} bytes of digests, which are 8 bytes each")
        taken.announced = message.stop

    def _grant(self) -> None:
        """Give announced chunks a place. Waits for room only while it holds none itself, so loads cannot deadlock."""
        while self._waiting:
            landing = self._landings[self._waiting[0]]
            landing.piece = self.staging.try_allocate(landing.message.length)
            while landing.piece is None:
                if any(other.region for other in self._landings.values()) or self.channel.readable(0):
                    return
                landing.piece = self._wait_for_room(landing.message.length)
            transport = self.transports[self.channel.agreement.transport]
            landing.region = transport.register(self.staging.view(landing.piece))
            self.channel.send(ch.Grant(self._waiting.popleft(), landing.region.key), self.load.deadline)

    def _wait_for_room(self, length: int) -> Piece | None:
        """A short wait, so that a cancel or the producer's Fail does not have to wait for other loads to end."""
        if self.load.cancelled:
            raise given_up()
        try:
            return self.staging.allocate(length, min(self.load.deadline, time.monotonic() + LOOK))
        except DeadlineExceeded:
            if time.monotonic() >= self.load.deadline:
                raise
            return None

    def _land(self, landing: Landing) -> None:
        """Verify a chunk that has arrived and scatter the part of it that was asked for."""
        assert landing.region is not None
        assert landing.piece is not None
        landing.region.withdraw()
        landing.region = None
        message, load = landing.message, self.load
        taken = self.taken[message.part]
        chunk = Chunk(message.start, message.stop)
        memory = self.staging.view(landing.piece)
        total = self._verified(taken.wire, chunk, memory, message) if self.verify else 0
        wanted = Chunk(max(chunk.start, taken.covered), min(chunk.stop, taken.stop))
        with load.writing:
            if load.over:
                raise given_up()
            if wanted.tokens > 0:
                producer = self.channel.peer.groups[taken.share.ours]
                taken.group.land(taken.wire, memory, producer, chunk, taken.table, wanted)
            taken.covered = chunk.stop
            load.moved += message.length
            load.total = (load.total + total) & _MASK
            load.tokens[taken.number] = load.tokens.get(taken.number, 0) + wanted.tokens

    def _verified(self, wire: Wire, chunk: Chunk, memory: memoryview, message: ch.Chunk) -> int:
        """The digest of what has arrived. Raises DigestMismatch when it is not that of what was staged."""
        theirs = np.frombuffer(message.digests, "<u8")
        ours = wire.digests(chunk, memory)
        if theirs.size != ours.size:
            raise DigestMismatch(
                "the chunk came with another number of digests",
                field="digest",
                ours=str(ours.size),
                theirs=str(theirs.size),
            )
        if (wrong := np.flatnonzero(ours.reshape(-1) != theirs)).size:
            raise _mismatch(wire, chunk, ours, theirs, int(wrong[0]))
        return digest.total(ours)

    def _clear(self, landing: Landing) -> None:
        region, piece = landing.region, landing.piece
        landing.region = landing.piece = None
        self.quarantine.let_go(region, piece)


def farewell(channel: ch.Channel, reason: Reason) -> None:
    # A peer that is gone already knows what the farewell would have told it.
    with contextlib.suppress(DeeplinkError):
        channel.send(ch.Quit(reason), time.monotonic() + FAREWELL_SECONDS)


def _mismatch(wire: Wire, chunk: Chunk, ours: digest.Tiles, theirs: np.ndarray, wrong: int) -> DigestMismatch:
    layer, side, head, tile = (int(place) for place in np.unravel_index(wrong, ours.shape))
    scales = "" if layer < len(wire.layers) else "the scales of "
    return DigestMismatch(
        f"the KV cache that arrived is not what was staged: {scales}layer {wire.layers[layer % len(wire.layers)]}, "
        f"{'kv'[side]}, head {wire.heads[0] + head}, tile {tile} of tokens [{chunk.start}, {chunk.stop})",
        field="digest",
        ours=f"{int(ours.reshape(-1)[wrong]):016x}",
        theirs=f"{int(theirs[wrong]):016x}",
        remedy="the link or a host corrupts memory; run the handoff again and look at both hosts",
    )
