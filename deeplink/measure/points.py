"""What the times of tokens say about the engine's steps. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from deeplink.errors import LocalError
from deeplink.measure.streams import Stream

LEAST_STEPS = 4


def prefill(streams: Sequence[Stream]) -> float:
    """Seconds from the first request to the last first token: all prompts were computed then."""
    return max(stream.tokens[0] for stream in streams) - min(stream.sent for stream in streams)


def decode(streams: Sequence[Stream]) -> tuple[float, float]:
    """Seconds of a step with all of these sequences, and how many tokens each had generated in the middle of it.

    Counted from when the last of them had begun until the first had ended: only then do all of them decode, and none
    prefills. Raises LocalError if that were fewer than LEAST_STEPS steps, or steps of no time.
    """
    begin = max(stream.tokens[0] for stream in streams)
    end = min(stream.tokens[-1] for stream in streams)
    steps, places = [], []
    for stream in streams:
        mine = [index for index, at in enumerate(stream.tokens) if begin <= at <= end]
        if len(mine) <= LEAST_STEPS:
            raise LocalError(
                f"{len(streams)} sequences decoded together for fewer than {LEAST_STEPS} steps",
                remedy="ask for more tokens, or for fewer requests: perhaps the engine does not take so many at once",
            )
        first, last = mine[0], mine[-1]
        steps.append((stream.tokens[last] - stream.tokens[first]) / (last - first))
        places.append((first + last) / 2)
    if median(steps) <= 0:
        raise LocalError(
            "all tokens of an answer came at once, so how long each took cannot be seen",
            remedy="measure the engine itself, and not through something that collects its stream",
        )
    return median(steps), median(places)


def line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """The latency and the seconds for each unit of size of a straight line through these, both at least 0: the median
    slope of all pairs, which a few outliers do not move, then the median of what is left."""
    slopes = [
        (b - a) / (y - x)
        for index, (x, a) in enumerate(zip(sizes, seconds, strict=True))
        for y, b in zip(sizes[index + 1 :], seconds[index + 1 :], strict=True)
        if y != x
    ]
    slope = max(median(slopes), 0.0) if slopes else 0.0
    return max(median(b - slope * x for x, b in zip(sizes, seconds, strict=True)), 0.0), slope
