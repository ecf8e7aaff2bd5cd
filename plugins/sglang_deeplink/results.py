"""The first token: out of a prefill request, and into the buffers where SGLang's decode side looks for it."""

from __future__ import annotations

from typing import Any

from deeplink.errors import Refused
from deeplink.kvconnector.handoffs.first_token import MAX_TOP, FirstToken


def taken(req: Any) -> FirstToken:
    """Of a request whose prefill is done, so that it has its first token."""
    logprob, top = None, []
    if req.return_logprob:
        scores = req.logprob
        if scores.output_token_logprobs_val:
            logprob = float(scores.output_token_logprobs_val[0])
        if scores.output_top_logprobs_val and scores.output_top_logprobs_val[0]:
            found = zip(scores.output_top_logprobs_idx[0], scores.output_top_logprobs_val[0], strict=True)
            top = [(int(token), float(score)) for token, score in found][:MAX_TOP]
    return FirstToken(int(req.output_ids[0]), logprob, tuple(top), int(req.cached_tokens))


def check(req: Any, first: FirstToken, most: int) -> None:
    """Raises Refused when the client wants to know more of the first token than has come with it. `most` is how many
    of the likeliest tokens SGLang's buffers hold."""
    if not req.return_logprob:
        return
    wanted = req.logprob.top_logprobs_num
    if first.logprob is None or len(first.top) < wanted or wanted > most:
        raise Refused(
            "the log-probabilities of the first token did not come with it",
            field="logprobs",
            ours=str(wanted),
            theirs=str(min(most, len(first.top))) if first.logprob is not None else "none",
            remedy="ask for no log-probabilities, or for fewer, or send the request to an engine that serves it alone",
        )


def put(buffers: Any, row: int, room: int, req: Any, first: FirstToken) -> None:
    """Into row `row` of SGLang's `MetadataBuffers`. The room comes last: it says that the others are there."""
    buffers.output_ids[row][0] = first.token
    buffers.cached_tokens[row].zero_()
    buffers.cached_tokens[row][0] = first.cached
    if req.return_logprob and first.logprob is not None:
        buffers.output_token_logprobs_val[row][0] = first.logprob
        buffers.output_token_logprobs_idx[row][0] = first.token
        for place, (token, score) in enumerate(first.top[: req.logprob.top_logprobs_num]):
            buffers.output_top_logprobs_idx[row][place] = token
            buffers.output_top_logprobs_val[row][place] = score
    buffers.bootstrap_room[row, 0] = room
