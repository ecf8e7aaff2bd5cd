"""Who may fill or claim which handoff until when.

The router mints one ticket per handoff and gives it to both engines; clients cannot make one, because it is
authenticated with a key derived from the shared secret. Clocks differ between hosts, so a ticket carries the
milliseconds that remain, and each side counts them from the moment it reads the ticket.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import secrets
from typing import Annotated

import msgspec

from deeplink import secret as shared
from deeplink.errors import TicketRefused
from deeplink.kvconnector.contracts.contract import Contract, Count, Name
from deeplink.kvconnector.contracts.negotiate import Agreement
from deeplink.kvconnector.contracts.shares import ranks

MAX_TEXT = 64 << 10
"""A ticket for two engines of 256 ranks each has about 12 KiB."""
MAX_RANKS = 1024
_MAC = "sha256"
_MAC_BYTES = 32


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """One handoff between two incarnations (`producer`, `consumer` are epochs).

    `channels` is where the producer's ranks are reached: it comes from the producer's contract through the router, and
    being inside the ticket it cannot be pointed elsewhere by a client. `claims` is how many times each consumer rank
    may load it. For each consumer rank, `takes` are the places in `channels` it takes from, in order. `wire` is the
    element type in which each of the producer's cache groups travels; empty, they travel as they are.
    """

    handoff: Name
    producer: Name
    consumer: Name
    channels: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1, max_length=MAX_RANKS)]
    milliseconds: Annotated[int, msgspec.Meta(ge=1, le=86_400_000)]
    claims: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    takes: Annotated[tuple[tuple[Count, ...], ...], msgspec.Meta(min_length=1, max_length=MAX_RANKS)] = ((0,),)
    wire: Annotated[tuple[Name, ...], msgspec.Meta(max_length=64)] = ()

    def sources(self, rank: int) -> tuple[str, ...]:
        """The channels a consumer rank takes from. Raises TicketRefused for a rank the ticket does not know."""
        if rank >= len(self.takes) or any(place >= len(self.channels) for place in self.takes[rank]):
            raise TicketRefused(
                "the ticket is for an engine of other ranks",
                field="ranks",
                ours=str(rank + 1),
                theirs=str(len(self.takes)),
                remedy="the router has an old contract of this engine; ask again",
            )
        return tuple(self.channels[place] for place in self.takes[rank])

    def expected(self, rank: int) -> int:
        """How many claims come to a producer rank."""
        return self.claims * sum(rank in places for places in self.takes)


def issue(
    handoff: str, producer: Contract, consumer: Contract, agreement: Agreement, milliseconds: int, claims: int = 1
) -> Ticket:
    """The ticket for one handoff between two engines that agree, from their first data-parallel replicas."""
    return Ticket(
        handoff,
        producer.epoch,
        consumer.epoch,
        tuple(rank.channel for rank in ranks(producer)),
        milliseconds,
        claims,
        agreement.takes,
        agreement.wire,
    )


_decoder = msgspec.msgpack.Decoder(Ticket)


def new_handoff() -> str:
    return secrets.token_hex(12)


def mint(ticket: Ticket, secret: bytes) -> str:
    body = msgspec.msgpack.encode(ticket)
    return base64.urlsafe_b64encode(_mac(body, secret) + body).decode()


def verify(text: object, secret: bytes) -> Ticket:
    """The ticket in `text`. Raises TicketRefused unless it was minted with this secret."""
    if not isinstance(text, str) or len(text) > MAX_TEXT:
        raise TicketRefused(f"the ticket is not a text of at most {MAX_TEXT} characters", field="ticket")
    try:
        raw = base64.b64decode(text, altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as exc:
        raise TicketRefused(f"the ticket is not base64: {exc}", field="ticket") from exc
    mac, body = raw[:_MAC_BYTES], raw[_MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(body, secret)):
        raise TicketRefused(
            "the ticket was not minted with this engine's secret",
            field="ticket",
            remedy="give the router and all engines the same secret_file; clients cannot pass tickets",
        )
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise TicketRefused(f"the ticket's body is malformed: {exc}", field="ticket") from exc


def _mac(body: bytes, secret: bytes) -> bytes:
    return hmac.digest(shared.derive(secret, "ticket"), body, _MAC)


def other_epoch(ours: str, theirs: str) -> TicketRefused:
    """What to raise for a ticket that names a former or a later start of this engine."""
    return TicketRefused(
        "the ticket is for another incarnation of this engine",
        field="epoch",
        ours=ours,
        theirs=theirs,
        remedy="the engine was restarted; ask again",
    )
