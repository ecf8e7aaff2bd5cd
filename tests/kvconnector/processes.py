"""A second Python process for tests, with this one's import path."""

from __future__ import annotations

import select
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

from deeplink.testing import peer


class Child:
    """Runs `program`; it talks back line by line on standard output."""

    def __init__(self, program: str, *arguments: str) -> None:
        path = f"import sys; sys.path[:] = {sys.path!r}\n"
        self._process = subprocess.Popen(
            [sys.executable, "-c", path + textwrap.dedent(program), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self, seconds: float = 40.0) -> str:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        assert ready, "the child says nothing"
        line = self._process.stdout.readline()
        assert line, "the child has ended"
        return line.strip()

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def signal(self, number: int) -> None:
        peer.send(self._process, number)

    def end(self) -> None:
        self._process.kill()
        self._process.wait(20)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def child(program: str, *arguments: str) -> Iterator[Child]:
    made = Child(program, *arguments)
    try:
        yield made
    finally:
        made.end()
