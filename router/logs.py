"""The log of a router that serves: one write for many lines, since most are of requests, and there are many.

A line is out within `SOON` seconds; one that warns, at once, and all before it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TextIO

SOON = 0.1
MOST = 512
"""Lines that wait."""


class Lines(logging.Handler):
    """Writes as `%(asctime)s %(levelname)s %(name)s: %(message)s`."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__()
        self._stream = stream or sys.stderr
        self._lines: list[str] = []
        self._soon = False
        self._second = -1
        self._date = ""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = f"{self._time(record.created)} {record.levelname} {record.name}: {record.getMessage()}\n"
            if record.exc_info and record.exc_info[0] is not None:
                line += logging.Formatter().formatException(record.exc_info) + "\n"
            self._lines.append(line)
            if record.levelno >= logging.WARNING or len(self._lines) >= MOST:
                self.flush()
            elif not self._soon:
                self._later()
        except (TypeError, ValueError):  # a record whose arguments do not fit, or a stream that was closed
            self.handleError(record)

    def say(self, name: str, line: str) -> None:
        """One line of level INFO."""
        self._lines.append(f"{self._time(time.time())} INFO {name}: {line}\n")
        if not self._soon:
            self._later()
        elif len(self._lines) >= MOST:
            self.flush()

    def flush(self) -> None:
        self._soon = False
        self.acquire()
        try:
            lines, self._lines = self._lines, []
            if lines:
                self._stream.write("".join(lines))
                self._stream.flush()
        finally:
            self.release()

    def close(self) -> None:
        self.flush()
        super().close()

    def _later(self) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # before it serves, or in a thread
            self.flush()
            return
        self._soon = True
        loop.call_later(SOON, self.flush)

    def _time(self, created: float) -> str:
        second = int(created)
        if second != self._second:
            self._second = second
            self._date = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))
        return f"{self._date},{int(1000 * (created - second)):03d}"


def sayer(log: logging.Logger) -> Callable[[str], None]:
    """How to log many lines of level INFO: past the library, where all that it would do is to ask `Lines` to write
    them."""
    handlers, at = list(log.handlers), log
    plain = log.isEnabledFor(logging.INFO) and not log.filters
    while at.propagate and at.parent is not None:
        at = at.parent
        handlers += at.handlers
    if plain and len(handlers) == 1 and isinstance(handlers[0], Lines) and not handlers[0].filters:
        return partial(handlers[0].say, log.name)
    return partial(log.info, "%s")


def to_stderr() -> None:
    """All that is logged from now on, in this process. Who called what is not looked up: no line says it."""
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # as the library's page on optimisation says
    logging.basicConfig(level=logging.INFO, handlers=[Lines()])
