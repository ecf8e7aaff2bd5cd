"""Keeping requests away from an engine that fails them, without asking more of it than one request at a time. Pure.

closed --(failures in a row)--> open --(time)--> half open --(one request succeeds)--> closed
                                 ^------(it fails, twice the time)-----'
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_SECONDS = 60.0


@dataclass(slots=True)
class Breaker:
    """Of one engine. All times are of one monotonic clock."""

    limit: int
    seconds: float
    failures: int = 0
    until: float = 0.0
    pause: float = 0.0
    trying: bool = False

    def shut(self, now: float) -> str:
        """Why the engine gets no request now; "" if it may have one."""
        if not self.until:
            return ""
        if now < self.until:
            return f"{self.failures} requests in a row failed, the next is tried in {self.until - now:.1f} s"
        return "one request is being tried after failures" if self.trying else ""

    def begin(self) -> bool:
        """A request is given to the engine. True if it is the one that tries whether the engine is well again, whose
        end has to be told, whatever it is."""
        if self.until and not self.trying:
            self.trying = True
            return True
        return False

    def ended(self) -> None:
        """The trying request ended without telling anything about the engine."""
        self.trying = False

    def succeeded(self) -> None:
        self.failures, self.until, self.pause, self.trying = 0, 0.0, 0.0, False

    def failed(self, now: float) -> None:
        self.failures += 1
        if self.failures >= self.limit and (not self.until or self.trying or now >= self.until):
            self.pause = min(MAX_SECONDS, 2 * self.pause if self.pause else self.seconds)
            self.until = now + self.pause
        self.trying = False
