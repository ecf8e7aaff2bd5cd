"""One external command of a longer job: its output goes to a log, and its failure says what to do next."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from deeplink.errors import LocalError

TAIL_LINES = 20
_NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")


def run(
    step: str,
    argv: Sequence[str | Path],
    *,
    log: Path,
    remedy: str,
    timeout: float,
    env: Mapping[str, str] | None = None,
) -> str:
    """Run `argv`, add its output to `log`, and return that output.

    `env` is added to an environment from which the caller's own Python settings are removed. Raises
    LocalError with the last lines of the output when the command fails, cannot start, or runs longer than
    `timeout` seconds.
    """
    words = [str(word) for word in argv]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a+", encoding="utf-8", errors="replace") as file:
        file.write(f"$ {' '.join(words)}\n")
        file.flush()
        start = file.tell()
        try:
            done = subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=clean_environ() | dict(env or {}),
                timeout=timeout,
                check=False,
            )
            failure = f"exit status {done.returncode}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            failure = f"not done after {timeout:.0f} s"
        except OSError as exc:
            failure = f"cannot be started: {exc.strerror}"
        file.seek(start)
        output = file.read()
    if failure:
        raise LocalError(f"{step}: {failure}\n{tail(output)}\n(whole output: {log})", remedy=remedy)
    return output


def tail(text: str, lines: int = TAIL_LINES) -> str:
    return "\n".join(text.rstrip().splitlines()[-lines:])


def clean_environ() -> dict[str, str]:
    """This process's environment without what would make another Python import this one's packages."""
    return {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
