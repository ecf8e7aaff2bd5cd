"""The token that prefill has sampled, and what the engine that goes on from it has to report of it.

The cache of a prompt says what comes after its last token only to an engine that computes that token again. Those that
go on from the whole prompt need the first token of the answer with it: a consumer whose order says so gets it with the
end of the handoff, once the producer has it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from deeplink.kvconnector.contracts.contract import Count

MAX_TOP = 1024
LogProb = Annotated[float, msgspec.Meta(le=2.0**128)]
"""Rounding may leave it a little above 0. It is never NaN, which is not equal to itself and has no JSON."""


class FirstToken(msgspec.Struct, frozen=True, omit_defaults=True):
    """`logprob` is None where nobody asked for it; `top` are the likeliest tokens with theirs, the likeliest first.

    `cached` counts the prompt's tokens that prefill had in its own cache, which is part of what the client is told.
    """

    token: Count
    logprob: LogProb | None = None
    top: Annotated[tuple[tuple[Count, LogProb], ...], msgspec.Meta(max_length=MAX_TOP)] = ()
    cached: Count = 0
