"""What an engine asks of its consumer side, and what it gets back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deeplink.errors import Reason
from deeplink.kvconnector.handoffs.first_token import FirstToken
from deeplink.kvconnector.handoffs.ticket import Ticket


@dataclass(frozen=True, slots=True)
class Order:
    """Load tokens ``[start, stop)`` of `prompt` into the blocks of `tables`, before the ticket's time is up.

    There is one table per cache group. `request` is the engine's own name for who waits. An empty range loads nothing
    and only lets the producer go. With `first` the load ends when the first token of the answer is here, too.
    """

    request: str
    ticket: Ticket
    ticket_text: str
    prompt: bytes
    start: int
    stop: int
    tables: Sequence[Sequence[int]]
    first: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one load ended; `reason` is None when every token is in its block, verified, and `first` is there if it was
    asked for."""

    order: Order
    reason: Reason | None
    first: FirstToken | None = None
