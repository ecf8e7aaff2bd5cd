"""One simulated engine: how far it is with its prompt and its batch."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from deeplink.solver.exact.problem import Role

EPSILON = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """`count` engines alike. `prefill(tokens)` is seconds for a prompt; a step of `n` sequences with `c` cached tokens
    in all takes ``step[0] + step[1] * n + step[2] * c`` seconds. `room` is tokens of cache."""

    name: str
    role: Role
    count: int
    prefill: Callable[[int], float] = lambda tokens: 0.0
    step: tuple[float, float, float] = (0.0, 0.0, 0.0)
    batch: int = 1
    room: float = math.inf
    part: float = 1.0


@dataclass(slots=True)
class Engine:
    """Brought up to date with `advance`, and only when something happens to it. `prompts` and `waiting` are numbers of
    requests before prefill and before decode, `ends` those that decode with the step after which they end; `work` is
    what is left of the prefill of `current`, in seconds. `version` tells an event that no longer holds."""

    group: int
    of: Group
    prompts: deque[int] = field(default_factory=deque)
    current: int = -1
    work: float = 0.0
    waiting: deque[int] = field(default_factory=deque)
    ends: list[tuple[float, int]] = field(default_factory=list)
    steps: float = 0.0
    cached: float = 0.0
    seconds: float = 1.0
    at: float = 0.0
    version: int = 0
    open: int = 0
    busy: float = 0.0

    def advance(self, now: float) -> None:
        passed = now - self.at
        if passed > 0:
            prefilling, decoding = self.current >= 0, bool(self.ends)
            if prefilling or decoding:
                self.busy += passed
            if prefilling:
                self.work -= passed * (self.of.part if decoding else 1.0)
            if decoding:
                speed = (1.0 - self.of.part) if prefilling and self.of.part < 1 else 1.0
                done = passed * speed / self.seconds
                self.steps += done
                self.cached += done * len(self.ends)
        self.at = now

    def next(self) -> float:
        """When something ends, if nothing else happens before."""
        decoding = bool(self.ends)
        soon = math.inf
        if self.current >= 0:
            soon = self.at + max(self.work, 0.0) / (self.of.part if decoding else 1.0)
        if decoding:
            speed = (1.0 - self.of.part) if self.current >= 0 and self.of.part < 1 else 1.0
            soon = min(soon, self.at + max(self.ends[0][0] - self.steps, 0.0) * self.seconds / speed)
        return soon

    def pace(self) -> None:
        fixed, each, cached = self.of.step
        self.seconds = fixed + each * len(self.ends) + cached * self.cached or EPSILON
