"""Where the time of a handoff goes: how long each side's threads spend in each of its steps.

Steps of different threads overlap, so their sum is more than the handoff took. Only between `begin` and `end` are the
functions below replaced by ones that look at the clock, so nothing is in the way of what is measured otherwise.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

from deeplink.kvconnector.caches.group import Entrance, Group
from deeplink.kvconnector.handoffs.landing import Landings
from deeplink.kvconnector.handoffs.pushing import Pushing
from deeplink.kvconnector.handoffs.serve import Serving

STEPS: dict[str, tuple[type, str]] = {
    "gather": (Group, "stage"),
    "digest": (Serving, "_digest"),
    "push": (Pushing, "post"),
    "acknowledge": (Pushing, "arrived"),
    "verify": (Landings, "_verified"),
    "scatter": (Entrance, "land"),
}
"""Step, and the method that is it. `push` is until the bytes are on their way and `acknowledge` the wait for them to be
there; their CPU time is that of the pushing thread: the receiving one's is in no step."""


class Stages:
    def __init__(self) -> None:
        self._spent: dict[str, float] = {}
        self._lock = threading.Lock()
        self._replaced: list[tuple[type, str, Any]] = []

    def begin(self) -> None:
        self._spent = {}
        for step, (owner, name) in STEPS.items():
            method = getattr(owner, name)
            self._replaced.append((owner, name, method))
            setattr(owner, name, self._timed(step, method))

    def end(self) -> dict[str, float]:
        """Seconds by step, of those that this process has taken, and under ``STEP cpu`` what its threads ran."""
        while self._replaced:
            setattr(*self._replaced.pop())
        return self._spent

    def _timed(self, step: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*arguments: Any, **options: Any) -> Any:
            began, cpu = time.perf_counter(), time.thread_time()
            try:
                return method(*arguments, **options)
            finally:
                spent = {step: time.perf_counter() - began, f"{step} cpu": time.thread_time() - cpu}
                with self._lock:
                    self._spent = {**self._spent, **{k: self._spent.get(k, 0.0) + v for k, v in spent.items()}}

        return timed
