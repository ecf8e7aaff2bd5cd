"""What may be tried again after a failure, and where not. Pure."""

from __future__ import annotations

from deeplink.errors import (
    DeadlineExceeded,
    DecodeFailed,
    DeeplinkError,
    HandoffError,
    PrefillFailed,
    TicketRefused,
)
from deeplink.router.choice import Pair, Plain
from deeplink.router.exchange import Answer
from deeplink.router.upstream import NotSent

UNAVAILABLE = (502, 503, 504)
UNSERVED = (404, 405, 501)
"""What an engine answers to a path that it does not have."""


class TurnedAway(DecodeFailed):
    """An engine without a handoff answered that it cannot serve now. That answer is the client's if no other can."""

    def __init__(self, message: str, answer: Answer) -> None:
        super().__init__(message)
        self.answer = answer


def names(choice: Plain | Pair) -> frozenset[str]:
    if isinstance(choice, Plain):
        return frozenset((choice.engine.name,))
    return frozenset((choice.prefill.name, choice.decode.name))


def blamed(error: DeeplinkError, choice: Plain | Pair) -> frozenset[str]:
    """The engines whose doing a failure may be; none if it would be the same with others, or there is no time left."""
    if isinstance(choice, Plain):
        return names(choice) if isinstance(error, DecodeFailed) else frozenset()
    if isinstance(error, PrefillFailed):
        return frozenset((choice.prefill.name,))
    if isinstance(error, DecodeFailed) or other_epoch(error):
        return frozenset((choice.decode.name,))
    if isinstance(error, HandoffError) and not isinstance(error, DeadlineExceeded):
        return names(choice)
    return frozenset()


def other_epoch(error: DeeplinkError) -> bool:
    """An engine was restarted since the router looked."""
    return isinstance(error, TicketRefused) and error.field == "epoch"


def stale(error: DeeplinkError) -> bool:
    """Whether fresh contracts may make the same request succeed at the same engines, at no engine's cost."""
    return other_epoch(error) or isinstance(error.__cause__, NotSent)
