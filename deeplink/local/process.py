"""One engine or router as a process of this machine, with a log file, that never outlives its owner."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from deeplink.errors import LocalError
from deeplink.local import launch, step

LOG_LINES = 30
GRACE_SECONDS = 8.0
_POLL_SECONDS = 0.1

# A proxy that the environment names is for the outside, not for this machine.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Process:
    """A command, not started yet; a context manager that starts it and stops it.

    It runs in a session of its own below the supervisor of `deeplink.local.launch`, so a Ctrl-C in the
    terminal does not reach it and every descendant ends with it. `env` is its whole environment. Output is
    added to `log`. `grace` is how many seconds it has between SIGTERM and SIGKILL.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str],
        log: Path,
        url: str = "",
        cwd: Path | None = None,
        grace: float = GRACE_SECONDS,
    ) -> None:
        self.name = name
        self.argv = [str(word) for word in argv]
        self.env = dict(env)
        self.log = log
        self.url = url
        self.cwd = cwd
        self.grace = grace
        self._supervisor: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Process:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Returns at once. The owner is this process, not the thread that calls."""
        if self._supervisor is not None:
            raise LocalError(f"{self.name} was started before")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        supervisor = [sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), str(self.grace)]
        with self.log.open("ab") as output:
            self._supervisor = subprocess.Popen(
                [*supervisor, *self.argv],
                env=self.env,
                cwd=self.cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """The exit status, or None while it runs. It has one only when no descendant is left."""
        return None if self._supervisor is None else self._supervisor.poll()

    def is_ready(self, path: str = "/health") -> bool:
        """Whether `GET path` answers 200. Raises LocalError with the log's end if it ended."""
        status = self.poll()
        if status is not None:
            raise LocalError(f"{self.name} ended with status {status}\n{self.log_tail()}", remedy=self._see())
        try:
            with _OPENER.open(self.url + path, timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, http.client.HTTPException):
            return False

    def wait_ready(self, seconds: float, path: str = "/health") -> None:
        """Wait until it is ready. Raises LocalError as soon as it ends, or after `seconds`."""
        wait_all_ready([self], seconds, path)

    def stop(self) -> None:
        """End it and every descendant; nothing happens if it has ended. Raises LocalError if one survives."""
        if self._supervisor is None:
            return
        if self._supervisor.poll() is None:
            self._supervisor.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._supervisor.wait(self.grace + launch.KILL_SECONDS + 5)
        # After the supervisor has ended in order there is no one left to signal; this is for when it has not.
        group = self._supervisor.pid
        if _signal_group(group, signal.SIGKILL):
            end = time.monotonic() + launch.KILL_SECONDS
            while _signal_group(group, 0):
                self._supervisor.poll()
                if time.monotonic() > end:
                    raise LocalError(
                        f"{self.name} does not end",
                        remedy=f"look at process group {group}: ps -o pid,stat,args",
                    )
                time.sleep(_POLL_SECONDS)

    def descendants(self) -> list[int]:
        """The process ids of the command and of all that it has started; empty before the start."""
        return [] if self._supervisor is None else launch.descendants(self._supervisor.pid)

    def log_tail(self, lines: int = LOG_LINES) -> str:
        try:
            return step.tail(self.log.read_text(errors="replace"), lines)
        except OSError as exc:
            return f"(no log: {exc.strerror})"

    def _see(self) -> str:
        return f"the whole log: {self.log}"


@contextmanager
def frozen(processes: Iterable[Process]) -> Iterator[None]:
    """Neither they nor what they have started run meanwhile."""
    pids = [pid for process in processes for pid in process.descendants()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def wait_all_ready(processes: Iterable[Process], seconds: float, path: str = "/health") -> None:
    """Wait for processes that start side by side, `seconds` for all of them together.

    Looks at them in turn, so the first that ends is reported at once, whichever it is.
    """
    deadline = time.monotonic() + seconds
    waiting = list(processes)
    while waiting := [process for process in waiting if not process.is_ready(path)]:
        if time.monotonic() > deadline:
            slow = waiting[0]
            raise LocalError(f"{slow.name} is not ready after {seconds:.0f} s\n{slow.log_tail()}", remedy=slow._see())
        time.sleep(_POLL_SECONDS)


def _signal_group(group: int, number: int) -> bool:
    """Whether the group had a member to signal."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True
