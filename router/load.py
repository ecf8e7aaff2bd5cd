"""What every engine has to do now, in tokens, for prefill and decode apart. The one place where load is counted.

A request counts from the moment it is given to an engine, before anything is sent, until its call has ended.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType

SMOOTHING = 0.2
"""Weight of the newest request in what a token took lately."""


class Hold:
    """One request at one engine. A context manager; ending it twice is harmless."""

    __slots__ = ("_began", "_ended", "_load", "_name", "_open", "decode", "prefill", "total")

    def __init__(self, load: Load, name: str, prefill: int, decode: int, ended: Callable[[], None]) -> None:
        self._load = load
        self._ended = ended
        self._name = name
        self._began = time.monotonic()
        self._open = True
        self.prefill = prefill
        self.decode = decode
        self.total = prefill + decode
        load.prefill[name] += prefill
        load.decode[name] += decode
        load.requests[name] += 1

    def prefilled(self) -> None:
        """The prompt has been computed; what is left is to decode."""
        if self._open:
            self._load.prefill[self._name] -= self.prefill
            self.prefill = 0

    def end(self, *, well: bool = False) -> None:
        """The engine is done with it; `well`: it did all that it was asked for, so its time tells something."""
        if not self._open:
            return
        self._open = False
        self._load.release(self._name, self.prefill, self.decode)
        if well and self.total:
            self._load.observe(self._name, (time.monotonic() - self._began) / self.total)
        self._ended()

    def __enter__(self) -> Hold:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


class Load:
    """`seconds` is what a token took lately, by engine. `others` is what other routers have given to an engine: tokens
    to prefill and to decode, and requests."""

    def __init__(self) -> None:
        self.prefill: Counter[str] = Counter()
        self.decode: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}
        self.others: dict[str, tuple[int, int, int]] = {}

    def counts(self) -> dict[str, tuple[int, int, int]]:
        """What this router has given, as others read it."""
        names = {name for name, count in self.requests.items() if count}
        return {name: (self.prefill[name], self.decode[name], self.requests[name]) for name in names}

    def all(self, name: str) -> tuple[int, int, int]:
        """Of all routers."""
        mine = self.prefill[name], self.decode[name], self.requests[name]
        if not self.others:
            return mine
        prefill, decode, requests = self.others.get(name, (0, 0, 0))
        return mine[0] + prefill, mine[1] + decode, mine[2] + requests

    def take(self, name: str, *, prefill: int = 0, decode: int = 0, ended: Callable[[], None] = lambda: None) -> Hold:
        """`ended` is called once, when the hold has ended."""
        return Hold(self, name, prefill, decode, ended)

    def release(self, name: str, prefill: int, decode: int) -> None:
        self.prefill[name] -= prefill
        self.decode[name] -= decode
        self.requests[name] -= 1

    def observe(self, name: str, seconds: float) -> None:
        old = self.seconds.get(name)
        self.seconds[name] = seconds if old is None else old + SMOOTHING * (seconds - old)

    def forget(self, name: str) -> None:
        """What was observed of an engine that is another one now."""
        self.seconds.pop(name, None)

    @property
    def idle(self) -> bool:
        return not any(self.requests.values()) and not any(self.prefill.values()) and not any(self.decode.values())
