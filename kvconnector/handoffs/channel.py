"""The conversation between two engines about one handoff at a time: framed msgpack over an authenticated socket.

    consumer -> producer   Hello  Claim  Grant  Landed  Quit
    producer -> consumer   Hello  Accept  Chunk  Sent  End  Fail

After both Hellos each side negotiates on its own; they reach the same answer. Then, per claim:

    Claim            ->  Accept | Fail
                     <-  Chunk(0) Chunk(1) …      as they are staged, a few ahead
    Grant(i, key)    ->                           where chunk i may be pushed
                     <-  Sent(i)                  after the transport's push of chunk i returned
    Landed(i)        ->                           verified and scattered; the producer may forget it
                     <-  End | Fail

Where the connection breaks in between, the consumer opens another and claims again, under the same name, from the first
tokens that have not landed.

The data itself never travels here. The engine's own control endpoint uses the same channel with Ask and Cancel, and an
engine that is not to claim before there is something to fetch finds out with Watch (`watching`).
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Annotated

import msgspec

from deeplink.errors import DeeplinkError, PeerGone, ProtocolError, Reason
from deeplink.kvconnector.contracts.contract import MAX_BYTES, Contract, Count, Name, Text
from deeplink.kvconnector.contracts.negotiate import Agreement
from deeplink.kvconnector.handoffs.first_token import FirstToken
from deeplink.kvconnector.handoffs.handoff import Record
from deeplink.kvconnector.handoffs.tally import Half, Tally
from deeplink.kvconnector.handoffs.ticket import MAX_TEXT as MAX_TICKET
from deeplink.kvconnector.relayout.digest import ALL, Sample
from deeplink.kvconnector.wires import frames, greeting, wire
from deeplink.kvconnector.wires.inbox import Inbox
from deeplink.kvconnector.wires.tls import Tls

PURPOSE = "channel"
MAX_FRAME = 4 << 20
LAST_SECONDS = 0.05

Short = Annotated[bytes, msgspec.Meta(max_length=64)]
Bytes = Annotated[int, msgspec.Meta(ge=0)]
"""A size of memory: unlike a `Count` it may well be above 2^31."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    contract: Annotated[bytes, msgspec.Meta(max_length=MAX_BYTES)]


class Part(msgspec.Struct, frozen=True):
    """Of the producer's cache group `group`, the heads ``[heads)`` of `layers`, for tokens ``[start, stop)``.

    Layers and heads are numbered as in the whole model.
    """

    group: Count
    layers: Annotated[tuple[Count, ...], msgspec.Meta(min_length=1, max_length=4096)]
    heads: tuple[Count, Count]
    start: Count
    stop: Count


class Claim(msgspec.Struct, frozen=True, tag="claim"):
    """The consumer wants `parts`, in the element types `wire`, pushed to `address` by the agreed `transport`.

    `claim` names this claim: after a broken link the consumer claims again under the same name, what it has not
    verified yet. Without parts it lets the producer go. It goes on at token `stop` of the prompt, which decides whether
    a state is the right one. Who does not `verify` is sent no digests; who verifies a `sample` is sent those of it, and
    0 for the other tiles. With `first` the End comes when the producer has sampled the first token of the answer, and
    brings it.
    """

    ticket: Annotated[str, msgspec.Meta(max_length=MAX_TICKET)]
    claim: Short
    prompt: Short
    parts: Annotated[tuple[Part, ...], msgspec.Meta(max_length=256)]
    transport: Name
    address: Text
    stop: Count = 0
    verify: bool = True
    sample: Sample = ALL
    first: bool = False


class Accept(msgspec.Struct, frozen=True, tag="accept"):
    pass


class Chunk(msgspec.Struct, frozen=True, tag="chunk"):
    """Tokens ``[start, stop)`` of a part of the claim are staged: `length` bytes in wire form, and the digest of each
    tile (uint64, LE). Chunks are numbered through, over all parts."""

    index: Count
    part: Count
    start: Count
    stop: Count
    length: Count
    digests: bytes


class Grant(msgspec.Struct, frozen=True, tag="grant"):
    index: Count
    key: Short


class Sent(msgspec.Struct, frozen=True, tag="sent"):
    index: Count


class Landed(msgspec.Struct, frozen=True, tag="landed"):
    index: Count


class End(msgspec.Struct, frozen=True, tag="end"):
    first: FirstToken | None = None


class Fail(msgspec.Struct, frozen=True, tag="fail"):
    reason: Reason


class Quit(msgspec.Struct, frozen=True, tag="quit"):
    reason: Reason


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """What is known of one handoff; with an empty name, of the whole process."""

    handoff: Name


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    handoff: Name


MAX_WATCHED = 256
"""Handoffs in one question."""


class Watch(msgspec.Struct, frozen=True, tag="watch"):
    """How far these handoffs are (`handoff.BEGUN` and its like). Answered at once if one is further than `known`, else
    after a moment. As many of these may follow on one channel as its owner likes."""

    handoffs: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_WATCHED)]
    known: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_WATCHED)]


class Watched(msgspec.Struct, frozen=True, tag="watched"):
    stages: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_WATCHED)]


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """`record` answers an Ask about a handoff (None: unknown), the rest an Ask about the process. `halves` are its
    sides, by name."""

    record: Record | None = None
    staging_capacity: Bytes = 0
    staging_used: Bytes = 0
    claims: Count = 0
    handoffs: Count = 0
    ended: dict[str, int] = {}
    late: Bytes = 0
    halves: dict[str, Half] = {}
    tallies: tuple[Tally, ...] = ()


Message = (
    Hello | Claim | Accept | Chunk | Grant | Sent | Landed | End | Fail | Quit | Ask | Cancel | Answer | Watch | Watched
)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def decode(data: bytes) -> Message:
    """Raises ProtocolError for anything that is not one of the messages above."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise ProtocolError(f"not a channel message: {exc}") from exc


class Channel:
    """One end of the conversation. One thread receives; sends and `close` may come from any thread.

    `peer` and `agreement` are there once the two sides have agreed. `broken` says that the connection has failed, as
    opposed to what was said on it.
    """

    peer: Contract
    agreement: Agreement

    def __init__(self, sock: socket.socket) -> None:
        self.broken = False
        self._shared = wire.Shared(sock)
        self._inbox = Inbox(sock)
        self._sending = threading.Lock()

    @staticmethod
    def connect(address: str, secret: bytes, deadline: float, tls: Tls | None = None) -> Channel:
        sock = wire.connect(address, deadline)
        try:
            sock = greeting.greet(sock, secret, PURPOSE, server=False, deadline=deadline, tls=tls)
        except DeeplinkError:
            sock.close()
            raise
        return Channel(sock)

    def send(self, message: Message, deadline: float) -> None:
        data = _encoder.encode(message)
        try:
            with self._sending, self._shared.use() as sock:
                wire.send(sock, frames.framed(data), deadline)
        except PeerGone:
            self.broken = True
            raise

    def receive(self, deadline: float) -> Message:
        try:
            with self._shared.use():
                length = frames.length(self._inbox.take(frames.HEAD, deadline), MAX_FRAME)
                return decode(self._inbox.take(length, deadline))
        except PeerGone:
            self.broken = True
            raise

    def readable(self, seconds: float) -> bool:
        try:
            with self._shared.use() as sock:
                return self._inbox.waiting or wire.readable(sock, seconds)
        except PeerGone:
            self.broken = True
            raise

    def ended(self) -> bool:
        """Whether the peer has closed the connection and all it said has been read. Does not wait."""
        try:
            with self._shared.use() as sock:
                return not self._inbox.waiting and wire.ended(sock)
        except PeerGone:
            self.broken = True
            raise

    def last_words(self) -> Reason | None:
        """Why the peer left, if it said so before: a Fail or Quit that has arrived and was not read yet.

        A connection that breaks while sending hides it otherwise. Nothing can be said on the channel afterwards.
        """
        with contextlib.suppress(DeeplinkError):
            while self.readable(LAST_SECONDS):
                message = self.receive(time.monotonic() + LAST_SECONDS)
                if isinstance(message, (Fail, Quit)):
                    return message.reason
        return None

    def close(self) -> None:
        self._shared.close()


def ask(address: str, secret: bytes, message: Ask | Cancel, seconds: float = 2.0, tls: Tls | None = None) -> Answer:
    """One question to a process's channel. Raises PeerGone, DeadlineExceeded or Refused."""
    deadline = time.monotonic() + seconds
    channel = Channel.connect(address, secret, deadline, tls)
    try:
        channel.send(message, deadline)
        answer = channel.receive(deadline)
    finally:
        channel.close()
    if not isinstance(answer, Answer):
        raise PeerGone(f"{address} answered a question with {type(answer).__name__}")
    return answer
