"""What every engine has to do now, in tokens, for prefill and decode apart. The one place where load is counted.

A request counts from the moment it is given to an engine, before anything is sent, until its call has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from types import TracebackType

from deeplink.router.policy import View

SMOOTHING = 0.2
"""Weight of the newest request in what a token took lately."""


class Hold:
    """One request at one engine, counted in what policies see of that. A context manager; ending it twice is harmless.
    `ended` is called once."""

    __slots__ = ("_began", "_ended", "_open", "_view", "decode", "prefill", "total")

    def __init__(self, view: View, prefill: int, decode: int, ended: Callable[[], None]) -> None:
        self._view = view
        self._ended = ended
        self._began = time.monotonic()
        self._open = True
        self.prefill = prefill
        self.decode = decode
        self.total = prefill + decode
        view.prefill += prefill
        view.decode += decode
        view.requests += 1

    def prefilled(self) -> None:
        """The prompt has been computed; what is left is to decode."""
        if self._open:
            self._view.prefill -= self.prefill
            self.prefill = 0

    def end(self, *, well: bool = False) -> None:
        """The engine is done with it; `well`: it did all that it was asked for, so its time tells something."""
        if not self._open:
            return
        self._open = False
        view = self._view
        view.prefill -= self.prefill
        view.decode -= self.decode
        view.requests -= 1
        if well and self.total:
            seconds, old = (time.monotonic() - self._began) / self.total, view.seconds
            view.seconds = old + SMOOTHING * (seconds - old) if old else seconds
        self._ended()

    def __enter__(self) -> Hold:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


class Load:
    """`others` is what other routers have given to an engine: tokens to prefill and to decode, and requests."""

    def __init__(self) -> None:
        self._views: dict[str, View] = {}
        self.others: dict[str, tuple[int, int, int]] = {}

    def of(self, name: str) -> View:
        """What this router has given to an engine, and what a token took there lately: always the same object, which
        changes with what it tells."""
        view = self._views.get(name)
        if view is None:
            view = self._views[name] = View(name)
        return view

    def counts(self) -> dict[str, tuple[int, int, int]]:
        """What this router has given, as others read it."""
        return {name: (view.prefill, view.decode, view.requests) for name, view in self._views.items() if view.requests}

    def all(self, name: str) -> tuple[int, int, int]:
        """Of all routers."""
        mine = self.of(name)
        prefill, decode, requests = self.others.get(name, (0, 0, 0))
        return mine.prefill + prefill, mine.decode + decode, mine.requests + requests

    def take(self, name: str, *, prefill: int = 0, decode: int = 0, ended: Callable[[], None] = lambda: None) -> Hold:
        """`ended` is called once, when the hold has ended."""
        return Hold(self.of(name), prefill, decode, ended)

    def forget(self, name: str) -> None:
        """What was observed of an engine that is another one now."""
        self.of(name).seconds = 0.0

    def keep(self, names: Collection[str]) -> None:
        """These are all engines that there are. What others still have to do is remembered until it is done."""
        for name in [name for name, view in self._views.items() if not view.requests and name not in names]:
            del self._views[name]

    @property
    def idle(self) -> bool:
        return not any(view.requests or view.prefill or view.decode for view in self._views.values())
