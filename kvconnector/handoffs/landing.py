"""The chunks that one conversation has under way: each is announced, given a place in staging, verified when it has
arrived, and scattered into the blocks.

Whatever a faulty producer announces, what is kept of it is bounded: at most MOST chunks, of tokens that are still
missing, with as many digests as they have tiles.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from deeplink.errors import Aborted, DeadlineExceeded, DigestMismatch, HandoffError, ProtocolError
from deeplink.kvconnector.caches.group import Entrance, Group, Wire
from deeplink.kvconnector.contracts.contract import CacheGroup
from deeplink.kvconnector.contracts.shares import Share
from deeplink.kvconnector.handoffs import channel as ch
from deeplink.kvconnector.handoffs.first_token import FirstToken
from deeplink.kvconnector.handoffs.order import Order
from deeplink.kvconnector.relayout import digest
from deeplink.kvconnector.relayout.plan import Chunk
from deeplink.kvconnector.transport.arena import Lent
from deeplink.kvconnector.transport.base import Region, Transport
from deeplink.kvconnector.transport.quarantine import Quarantine
from deeplink.kvconnector.transport.staging import Piece, Staging

LOOK = 0.05
"""Seconds between two looks at the channel while waiting for room."""
MOST = 1024
"""Chunks that may be announced and not landed. A producer announces a few, but of all parts of a claim at once."""
_MASK = (1 << 64) - 1


def given_up() -> Aborted:
    return Aborted("the decode request was given up")


@dataclass(slots=True, eq=False)
class Load:
    """One order while it is carried out, into `groups` as they were when it was given. Of what arrives, the tiles of
    `sample` are verified. `writing` is held while blocks are written, and to set `over`: after that none is. `channels`
    are those in use, guarded by `lock`. `converting` are the seconds that writing has taken."""

    order: Order
    groups: Sequence[Group]
    deadline: float
    sample: digest.Sample = digest.ALL
    lock: threading.Lock = field(default_factory=threading.Lock)
    channels: set[ch.Channel] = field(default_factory=set)
    cancelled: bool = False
    writing: threading.Lock = field(default_factory=threading.Lock)
    over: bool = False
    moved: int = 0
    total: int = 0
    resumed: int = 0
    converting: float = 0.0
    tokens: dict[int, int] = field(default_factory=dict)
    """How many tokens have landed, of each share."""
    first: FirstToken | None = None
    loaded: bool = False
    """All is in its blocks and the engine knows; some producers may not."""


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
    _entrance: tuple[CacheGroup, Entrance] | None = None

    def entrance(self, producer: CacheGroup) -> Entrance:
        """The way into the blocks for what this producer has staged; it is the same for every chunk."""
        if self._entrance is None or self._entrance[0] is not producer:
            self._entrance = producer, self.group.entrance(self.wire, producer)
        return self._entrance[1]

    def part(self) -> ch.Part:
        return ch.Part(self.share.ours, self.share.layers, self.share.heads, self.covered, self.stop)

    @property
    def complete(self) -> bool:
        return self.covered >= self.stop


@dataclass(slots=True)
class Landing:
    """A chunk that was announced: first without, then with a place in staging the peer may push to."""

    message: ch.Chunk
    piece: Piece | None = None
    region: Region | None = None


@dataclass(slots=True)
class Landings:
    """Of one conversation on `channel`. Whoever makes it clears it in the end."""

    load: Load
    taken: tuple[Taken, ...]
    channel: ch.Channel
    transport: Transport
    staging: Staging
    quarantine: Quarantine
    verify: bool
    _landings: dict[int, Landing] = field(default_factory=dict)
    _waiting: deque[int] = field(default_factory=deque)

    @property
    def pending(self) -> int:
        return len(self._landings)

    def announce(self, message: ch.Chunk) -> None:
        """Raises ProtocolError for a chunk that is not the next one of its part."""
        self._check(message)
        self._landings[message.index] = Landing(message)
        self._waiting.append(message.index)

    def arrive(self, message: ch.Sent) -> None:
        """Verify a chunk that has come, and write it into the blocks."""
        landing = self._landings.get(message.index)
        if landing is None or landing.region is None:
            raise ProtocolError(f"chunk {message.index} was sent, which has been given no place")
        self._land(landing)
        self._clear(self._landings.pop(message.index))

    def clear(self) -> None:
        """Let go of what was announced and has not landed."""
        for landing in self._landings.values():
            self._clear(landing)
        self._landings.clear()
        self._waiting.clear()

    def _check(self, message: ch.Chunk) -> None:
        """The chunks of a part come in order, each starting where the last ended (the first may begin before what is
        missing)."""
        if message.part >= len(self.taken):
            raise ProtocolError(f"a chunk of part {message.part} of {len(self.taken)}")
        taken = self.taken[message.part]
        length = taken.wire.length(max(0, message.stop - message.start))
        in_order = message.start <= taken.announced < min(message.stop, taken.stop)
        if not in_order or message.length != length or message.index in self._landings:
            raise ProtocolError(
                f"a chunk of tokens [{message.start}, {message.stop}) with {message.length} bytes, "
                f"when token {taken.announced} of {taken.stop} was next and {length} bytes are right"
            )
        if len(self._landings) == MOST:
            raise ProtocolError(f"more than {MOST} chunks announced at once")
        if len(message.digests) % 8:
            raise ProtocolError(f"{len(message.digests)} bytes of digests, which are 8 bytes each")
        taken.announced = message.stop

    def grant(self) -> None:
        """Give announced chunks a place. Waits for room only while it holds none itself, so loads cannot deadlock."""
        while self._waiting:
            landing = self._landings[self._waiting[0]]
            landing.piece = self.staging.try_allocate(landing.message.length)
            while landing.piece is None:
                if any(other.region for other in self._landings.values()) or self.channel.readable(0):
                    return
                landing.piece = self._wait_for_room(landing.message.length)
            landing.region = self.transport.register(self.staging.view(landing.piece))
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
        """Verify it, and scatter the part of it that was asked for."""
        assert landing.region is not None
        assert landing.piece is not None
        landing.region.withdraw()
        lent, landing.region = landing.region.lent, None
        message, load = landing.message, self.load
        taken = self.taken[message.part]
        chunk = Chunk(message.start, message.stop)
        memory = self.staging.view(landing.piece) if lent is None else lent.memory
        try:
            total = self._verified(taken.wire, chunk, memory, message) if self.verify else 0
        except DigestMismatch:
            _still_lent(lent)
            raise
        wanted = Chunk(max(chunk.start, taken.covered), min(chunk.stop, taken.stop))
        with load.writing:
            if load.over:
                raise given_up()
            if wanted.tokens > 0:
                entrance = taken.entrance(self.channel.peer.groups[taken.share.ours])
                began = time.perf_counter()
                entrance.land(memory, chunk, taken.table, wanted)
                load.converting += time.perf_counter() - began
            _still_lent(lent)
            # A chunk may go on where the part has ended.
            taken.covered = min(chunk.stop, taken.stop)
            load.moved += message.length
            load.total = (load.total + total) & _MASK
            load.tokens[taken.number] = load.tokens.get(taken.number, 0) + wanted.tokens

    def _verified(self, wire: Wire, chunk: Chunk, memory: memoryview, message: ch.Chunk) -> int:
        """The digest of what has arrived. Raises DigestMismatch when it is not that of what was staged."""
        theirs = np.frombuffer(message.digests, "<u8")
        ours = wire.digests(chunk, memory, self.load.sample)
        if theirs.size != ours.size:
            raise DigestMismatch(
                "the chunk came with another number of digests",
                field="digest",
                ours=str(ours.size),
                theirs=str(theirs.size),
            )
        wrongs = ours.reshape(-1) != theirs
        if self.load.sample.every > 1:  # a producer that knows of no samples has sent all of them
            wrongs &= ours.reshape(-1) != 0
        if (wrong := np.flatnonzero(wrongs)).size:
            raise _mismatch(wire, chunk, ours, theirs, int(wrong[0]))
        return digest.total(ours)

    def _clear(self, landing: Landing) -> None:
        region, piece = landing.region, landing.piece
        landing.region = landing.piece = None
        self.quarantine.let_go(region, piece)


def _still_lent(lent: Lent | None) -> None:
    """Raises when the producer has taken back what was read: it may have been somebody else's by then."""
    if lent is not None and not lent.intact():
        raise HandoffError("the prefill engine ended the handoff while its staging memory was read")


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
