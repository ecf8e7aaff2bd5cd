"""A second Python process that answers questions: one JSON object per line, each way.

The program is a function of a module that is called once with what answers: a function from question to answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import IO, Any

START_SECONDS = 60.0

Message = dict[str, Any]
Answer = Callable[[Message], Message]


class ChildFailed(RuntimeError):
    """The process ended, or did not answer in time; its own error is on stderr."""


class Child:
    """`program` is ``module:function``; the function gets `arguments` and returns what answers questions.

    It is in the network namespace of the thread that makes it, and has the interpreter and the import path of this
    process unless it is given others.
    """

    def __init__(
        self,
        program: str,
        *arguments: str,
        python: Path | None = None,
        path: Path | None = None,
        environ: Mapping[str, str] | None = None,
        log: IO[str] | None = None,
    ) -> None:
        before = f"sys.path.insert(0, {str(path)!r})" if path else f"sys.path[:] = {sys.path!r}"
        code = f"import sys; {before}; from deeplink.bench.child import serve; serve(*sys.argv[1:])"
        self._process = subprocess.Popen(
            [python or sys.executable, "-c", code, program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **(environ or {})},
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, **question: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as exc:
            raise ChildFailed("the other process has ended") from exc

    def hear(self, seconds: float = START_SECONDS) -> Message:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        if not ready:
            raise ChildFailed(f"the other process says nothing for {seconds:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise ChildFailed("the other process has ended")
        answer: Message = json.loads(line)
        return answer

    def ask(self, seconds: float = START_SECONDS, **question: Any) -> Message:
        self.tell(**question)
        return self.hear(seconds)

    def end(self) -> None:
        self._process.kill()
        self._process.wait(START_SECONDS)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


@contextlib.contextmanager
def child(program: str, *arguments: str) -> Iterator[Child]:
    made = Child(program, *arguments)
    try:
        yield made
    finally:
        made.end()


def serve(program: str, *arguments: str) -> None:
    """The process itself. It ends with its standard input."""
    # What a library prints goes elsewhere, or it would pass for an answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    answer: Answer = resolve_name(program)(*arguments)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)
    # Libraries with threads of their own crash in the interpreter's shutdown; nothing is left to be done.
    os._exit(0)


def cpu_seconds(pids: Sequence[int] = ()) -> float:
    """What this process and the others have run so far, threads that have ended included. Linux."""
    # The clock of another process: clock_getcpuclockid(3) makes its number so.
    return time.process_time() + sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)
