"""What of one request a handoff depends on: its ticket's time, what its cache is keyed by, and its first token.

A request's `sequence` and `sampling` are LMDeploy's, of 0.18.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from deeplink.errors import DeadlineExceeded, Refused
from deeplink.kvconnector.contracts.prompt import not_handed_over
from deeplink.kvconnector.handoffs.first_token import MAX_TOP, FirstToken
from deeplink.kvconnector.handoffs.ticket import Ticket

Scores = tuple[Sequence[float], Sequence[int]]
"""LMDeploy's log-probabilities at one place, the chosen token's and those of the likeliest; and which these are."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """A ticket that was read, and until when it is good, in seconds of time.monotonic."""

    ticket: Ticket
    until: float

    @staticmethod
    def now(ticket: Ticket) -> Admitted:
        return Admitted(ticket, time.monotonic() + ticket.milliseconds / 1000)

    @property
    def seconds(self) -> float:
        return max(0.0, self.until - time.monotonic())

    def left(self) -> Ticket:
        """The ticket with the time that it has left. Raises DeadlineExceeded where that is none."""
        milliseconds = int(self.seconds * 1000)
        if not milliseconds:
            raise DeadlineExceeded("the engine came to the request after the ticket's deadline")
        return msgspec.structs.replace(self.ticket, milliseconds=milliseconds)


def identity(sequence: Any) -> list[str]:
    """What but the tokens decides the cache of a prompt. Raises Refused for what is not handed over."""
    for field, asked in (
        ("media", not sequence.history_multimodals.empty() or len(sequence.history_embeddings) > 0),
        ("response_format", bool(sequence.sampling_param.response_format)),
    ):
        if asked:
            raise not_handed_over(field)
    return [f"lora={sequence.adapter_name}"] if sequence.adapter_name else []


def first_token(token: int, scores: Sequence[Scores] | None) -> FirstToken:
    """Of a prefill request that has been answered, with log-probabilities where the client asked for them."""
    if not scores:
        return FirstToken(token)
    values, tokens = scores[0]
    top = tuple(zip(map(int, tokens[1:]), map(float, values[1:]), strict=True))
    return FirstToken(token, float(values[0]), top[:MAX_TOP])


def logprobs(sampling: Any, first: FirstToken) -> list[dict[int, float]] | None:
    """Those of the first token as LMDeploy tells them. Raises Refused where the client wants more than has come."""
    wanted = sampling.num_logprobs
    if wanted <= 0:
        return None
    if first.logprob is None or len(first.top) < wanted:
        raise Refused(
            "the log-probabilities of the first token did not come with it",
            field="logprobs",
            ours=str(wanted),
            theirs="none" if first.logprob is None else str(len(first.top)),
            remedy="ask for no log-probabilities, or for fewer, or send the request to an engine that serves it alone",
        )
    return [{first.token: first.logprob, **dict(first.top[:wanted])}]


def is_last(sampling: Any, token: int) -> bool:
    """Whether an answer ends with its first token."""
    return sampling.max_new_tokens <= 1 or token in sampling.stop_words
