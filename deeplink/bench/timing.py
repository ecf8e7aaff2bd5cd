"""Rounds in which the figures and their marks take turns, so that a busy machine slows both; the best round counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from deeplink.bench.child import cpu_seconds

Action = Callable[[], object]
"""What is timed. One that returns a float has taken its own time, in seconds."""


@dataclass
class Best:
    """Of the fastest round the seconds, and of the cheapest the CPU seconds of all processes."""

    seconds: float = float("inf")
    cpu: float = float("inf")

    def per_second(self, size: float) -> float:
        return size / self.seconds


def take_turns(actions: Mapping[str, Action], rounds: int, others: Sequence[int] = ()) -> dict[str, Best]:
    """`others` are the processes that do their part of the actions. A first round touches the memory."""
    best = {name: Best() for name in actions}
    for round_ in range(rounds + 1):
        for name, action in actions.items():
            cpu, began = cpu_seconds(others), time.perf_counter()
            took = action()
            seconds = took if isinstance(took, float) else time.perf_counter() - began
            spent = cpu_seconds(others) - cpu
            if round_:
                best[name].seconds = min(best[name].seconds, seconds)
                best[name].cpu = min(best[name].cpu, spent)
    return best
