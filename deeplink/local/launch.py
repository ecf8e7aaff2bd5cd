"""The supervisor of one process tree: `python launch.py PARENT GRACE COMMAND...`.

It exists so that nothing is left behind, however the demo or a test run ends. It starts the command, adopts
whatever the command's own children orphan (an engine has three generations), and ends the whole tree when

 - it is asked to (SIGTERM): the command first gets the same signal and GRACE seconds to end in order,
 - its parent (the process PARENT) is gone, even by SIGKILL,
 - the command itself ends, leaving children.

It exits with the command's status, and only when no descendant is alive. If the supervisor itself is killed,
the kernel passes that on to the command. Run by path with nothing but the standard library, so that it starts
in a few milliseconds and does not depend on the command's PYTHONPATH. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

LOOK_SECONDS = 0.25
KILL_SECONDS = 10.0
CANNOT_START = 127

_WATCHED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}


def supervise(parent: int, grace: float, command: list[str]) -> int:
    """Run `command` until one of the ends above; returns its exit status, 128 + n for a signal n."""
    # Blocked before the fork: a signal that arrives between two looks waits instead of ending this process.
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    child = _start(command)
    status: int | None = None
    while status is None and os.getppid() == parent:
        received = signal.sigtimedwait(_WATCHED, LOOK_SECONDS)
        status = _reap(child, status)
        if received is not None and received.si_signo != signal.SIGCHLD:
            break
    if status is None:
        status = _ask(child, grace)
    status = _kill_tree(child, status)
    return 128 + signal.SIGKILL if status is None else status


def _start(command: list[str]) -> int:
    """Fork and exec, which is safe here: this process has one thread."""
    supervisor = os.getpid()
    child = os.fork()
    if child:
        return child
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != supervisor:  # it died before the line above
        os._exit(CANNOT_START)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
    try:
        os.execvp(command[0], command)
    except OSError as exc:
        print(f"cannot start {command[0]}: {exc.strerror}", file=sys.stderr, flush=True)
        os._exit(CANNOT_START)


def _ask(child: int, grace: float) -> int | None:
    """SIGTERM to the command alone: it knows best in which order its children end."""
    os.kill(child, signal.SIGTERM)
    return _wait(child, None, grace)


def _kill_tree(child: int, status: int | None) -> int | None:
    """SIGKILL to every descendant until there is none; new ones may appear while the old ones die."""
    deadline = time.monotonic() + KILL_SECONDS
    while _has_children() and time.monotonic() < deadline:
        for pid in descendants(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        status = _wait(child, status, 0.05)
    return status


def _wait(child: int, status: int | None, seconds: float) -> int | None:
    deadline = time.monotonic() + seconds
    while True:
        status = _reap(child, status)
        left = deadline - time.monotonic()
        if left <= 0 or (status is not None and not _has_children()):
            return status
        signal.sigtimedwait({signal.SIGCHLD}, min(left, LOOK_SECONDS))


def _reap(child: int, status: int | None) -> int | None:
    """Collect what has ended, adopted orphans too; the command's own status is kept."""
    while True:
        try:
            pid, raw = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == child:
            code = os.waitstatus_to_exitcode(raw)
            status = code if code >= 0 else 128 - code


def _has_children() -> bool:
    """As a subreaper, this process has no child only when it has no descendant."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            # pid (name) state parent ...; the name may hold anything, parentheses too
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found: list[int] = []
    pending = [root]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


if __name__ == "__main__":
    sys.exit(supervise(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
