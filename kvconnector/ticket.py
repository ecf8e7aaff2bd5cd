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
from deeplink.kvconnector.contract import Name

MAX_TEXT = 4096
_MAC = "sha256"
_MAC_BYTES = 32


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """One handoff between two incarnations (`producer`, `consumer` are epochs).

    `channel` is where the consumer claims: it comes from the producer's contract through the router, and being
    inside the ticket it cannot be pointed elsewhere by a client. `claims` is how many consumers may load it.
    """

    handoff: Name
    producer: Name
    consumer: Name
    channel: Name
    milliseconds: Annotated[int, msgspec.Meta(ge=1, le=86_400_000)]
    claims: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1


_decoder = msgspec.msgpack.Decoder(Ticket)


def new_handoff() -> str:
    return secrets.token_hex(12)


def mint(ticket: Ticket, secret: bytes) -> str:
    body = msgspec.msgpack.encode(ticket)
    return base64.urlsafe_b64encode(_mac(body, secret) + body).decode()


def verify(text: object, secret: bytes) -> Ticket:
    """The ticket in `text`. Raises TicketRefused unless it was minted with this secret."""
    if not isinstance(text, str) or len(text) > MAX_TEXT:
        raise TicketRefused("the ticket is not a text of at most 4096 characters", field="ticket")
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
    except msgspec.DecodeError as exc:
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
