"""A vendor's own tool, run with a deadline. A tool that is not here, fails, hangs or prints without end is an answer
that says so, never an error or a wait."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

MAX_BYTES = 1 << 20
_REAP_SECONDS = 0.02

Ending = Literal["answered", "absent", "failed", "timeout"]


@dataclass(frozen=True, slots=True)
class Answer:
    """How a run ended. `text` is what it printed when it answered; `detail` says what went wrong when it did not."""

    ending: Ending
    text: str = ""
    detail: str = ""


Runner = Callable[[Sequence[str], float, Sequence[str]], Answer]
"""Runs a command until a deadline in seconds from now; the last argument has folders to find it in, after the path."""


def run(command: Sequence[str], seconds: float, elsewhere: Sequence[str] = ()) -> Answer:
    """Never raises for what the tool does. Whatever the tool started is killed with it; one that the kernel does not
    let die, as with a driver that hangs, is left behind."""
    deadline = time.monotonic() + seconds
    program = shutil.which(command[0]) or shutil.which(command[0], path=os.pathsep.join(elsewhere))
    if program is None:
        return Answer("absent", detail=f"{command[0]} is not installed")
    try:
        process = subprocess.Popen(
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "LC_ALL": "C"},
            start_new_session=True,
        )
    except OSError as exc:
        return Answer("failed", detail=f"{command[0]} does not start: {exc.strerror or exc}")
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        output, errors, ended = _read(process, deadline)
        if ended and (code := _wait(process, max(0.0, deadline - time.monotonic()))) is not None:
            if code == 0:
                return Answer("answered", output.decode(errors="replace"))
            said = (errors or output).decode(errors="replace").strip().splitlines()
            return Answer("failed", detail=f"{command[0]} ended with {code}: {(said or ['no words'])[-1][:200]}")
        _kill(process)
    if max(len(output), len(errors)) > MAX_BYTES:
        return Answer("failed", detail=f"{command[0]} printed more than {MAX_BYTES} bytes")
    return Answer("timeout", detail=f"{command[0]} did not answer within {seconds * 1000:.0f} ms")


def _read(process: subprocess.Popen[bytes], deadline: float) -> tuple[bytes, bytes, bool]:
    """What was printed until both ends closed, which `True` says, or until the deadline or too much of it."""
    buffers = {process.stdout: bytearray(), process.stderr: bytearray()}
    with selectors.DefaultSelector() as selector:
        for stream in buffers:
            assert stream is not None
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            left = deadline - time.monotonic()
            ready = selector.select(left) if left > 0 else []
            if not ready or any(len(buffer) > MAX_BYTES for buffer in buffers.values()):
                return bytes(buffers[process.stdout]), bytes(buffers[process.stderr]), False
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                if data:
                    buffers[key.fileobj] += data  # type: ignore[index]
                else:
                    selector.unregister(key.fileobj)
    return bytes(buffers[process.stdout]), bytes(buffers[process.stderr]), True


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if _wait(process, _REAP_SECONDS) is None:
        # The kernel may hold it for long, as with a driver that hangs; a thread of its own sees it end, or never.
        threading.Thread(target=process.wait, name="deeplink-reap", daemon=True).start()
