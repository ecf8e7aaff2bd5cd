"""Requests that come when they come, whoever serves them: what `pd.py --load` puts on each way of serving in turn."""

from __future__ import annotations

import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from rows import Row

SEED = 1
SPARE_SECONDS = 180.0
"""For what is still on its way when the last request has come."""

Ask = Callable[[list[int]], Iterator[float]]
"""Serves one prompt: when each of its tokens came, of time.perf_counter()."""


@dataclass(frozen=True)
class Request:
    """Comes `at` so many seconds, with a prompt of `length` tokens."""

    at: float
    length: int


@dataclass
class Served:
    """Seconds: to each request's first token, and between each two tokens of all of them."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)


def arrivals(rate: float, seconds: float, lengths: Sequence[int]) -> list[Request]:
    """The same for every way and in every run: at random times, `rate` of them a second, the lengths in turn.

    Of a Poisson process whose number of arrivals is known these are independent and uniform.
    """
    dice = random.Random(SEED)
    times = sorted(dice.uniform(0, seconds) for _ in range(max(1, round(rate * seconds))))
    return [Request(at, length) for at, length in zip(times, itertools.cycle(lengths), strict=False)]


def serve(requests: Sequence[Request], prompts: Sequence[list[int]], ask: Ask) -> Served:
    """All of them, each when it comes. Raises SystemExit for one that is not answered."""
    served, failed = Served(), list[str]()
    lock = threading.Lock()
    began = time.perf_counter()

    def run(request: Request, prompt: list[int]) -> None:
        due = began + request.at
        time.sleep(max(0.0, due - time.perf_counter()))
        try:
            times = list(ask(prompt))
        except (OSError, SystemExit) as exc:
            failed.append(str(exc))
            return
        with lock:
            served.first.append(times[0] - due)
            served.between += [later - earlier for earlier, later in itertools.pairwise(times)]

    threads = [threading.Thread(target=run, args=one, daemon=True) for one in zip(requests, prompts, strict=True)]
    for thread in threads:
        thread.start()
    end = began + requests[-1].at + SPARE_SECONDS
    for thread in threads:
        thread.join(max(0.0, end - time.perf_counter()))
    if failed or len(served.first) < len(requests):
        raise SystemExit(f"{len(served.first)} of {len(requests)} requests were answered: {failed[:1]}")
    return served


def rows(served: dict[str, Served], rate: float) -> list[Row]:
    """Deeplink's figures beside those of the others."""
    ours, found = served["deeplink"], []
    note = f"{len(ours.first)} requests, {rate:g} a second"
    for name, of in (("ttft", "first"), ("itl", "between")):
        for part, other in itertools.product((0.5, 0.99), ("nixl", "aggregated")):
            mark_name = {"nixl": "built-in NIXL connector", "aggregated": "both engines alone, in turn"}[other]
            value, mark = (1000 * percentile(getattr(one, of), part) for one in (ours, served[other]))
            found.append(Row(f"{name}_p{100 * part:.0f}_{other}", value, "ms", mark_name, mark, note=note))
    return found


def percentile(values: Sequence[float], part: float) -> float:
    """The nearest rank: of few values, a high one is the largest."""
    return sorted(values)[max(0, math.ceil(part * len(values)) - 1)]
