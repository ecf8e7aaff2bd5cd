"""A second process on this host that listens for the doctor, so that transports are tried as engines use them.

It shares a secret with its parent that nobody else has, and ends when its parent closes the pipe or is gone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from deeplink.config import Config
from deeplink.doctor import exchange, kit
from deeplink.doctor.answering import Answering
from deeplink.doctor.subject import Effort
from deeplink.errors import LocalError
from deeplink.kvconnector.wires.listener import Listener
from deeplink.plugins import load_plugins

HOST = "127.0.0.1"
START_SECONDS = 60.0
END_SECONDS = 10.0
LAST_SECONDS = 1.0
SHOWN = 500
"""Of what it said last, characters."""
_PROGRAM = "import sys; sys.path[:] = {path!r}; from deeplink.doctor.second import main; main()"


@dataclass(frozen=True, slots=True)
class Second:
    """The running process, as its parent sees it."""

    address: str
    process: subprocess.Popen[str]
    said: IO[str]

    def last_words(self) -> str:
        """How it ended, if it has, and what it said last."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(LAST_SECONDS)
        code = self.process.returncode
        self.said.seek(0)
        tail = self.said.read()[-SHOWN:].strip()
        how = "" if code is None else f"the second process ended with {_named(code)}; "
        return how + (f"it said last: {tail}" if tail else "it said nothing")


def _named(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:  # not by a signal
        return f"exit code {code}"


@contextlib.contextmanager
def running(config: Config, secret: bytes, effort: Effort) -> Iterator[Second]:
    """Raises LocalError when it does not start."""
    order = {"secret": secret.hex(), "config": config.model_dump(mode="json"), "size": effort.size}
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        # With this process's import path, which need not be what a fresh interpreter has.
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(path=sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )
        try:
            address = _tell(process, json.dumps({**order, "seconds": effort.seconds}))
            second = Second(address, process, said)
            if not address:
                raise LocalError(f"a second process does not start here: {second.last_words()}")
            yield second
        finally:
            _end(process)


def _tell(process: subprocess.Popen[str], order: str) -> str:
    """Where it listens; empty when it does not."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(f"{order}\n")
        process.stdin.flush()
    ready, _, _ = select.select([process.stdout], [], [], START_SECONDS)
    return process.stdout.readline().strip() if ready else ""


def _end(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main() -> None:
    """The process itself."""
    logging.basicConfig(level=logging.ERROR)
    # What a library prints goes elsewhere, or it would pass for the address.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    order = json.loads(sys.stdin.readline())
    config, secret = Config.model_validate(order["config"]), bytes.fromhex(order["secret"])
    with kit.started(config, load_plugins(), secret, Effort(order["size"], order["seconds"])) as ours:
        listener = Listener(HOST, secret, exchange.PURPOSE, Answering(ours, lambda meeting: None).serve)
        print(listener.address, file=answers, flush=True)
        sys.stdin.read()
        listener.close()
