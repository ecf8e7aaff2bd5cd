"""A second process that runs a transport, to be frozen and killed by tests.

It reads the secret in hex, then commands; each is answered by one line.

    region SIZE               register zeroed memory; answers its key in hex
    sum N, tail N             the sum of the bytes of the Nth region, or its last 16 bytes in hex
    storm ADDRESS KEY SIZE    connect, answer ``storming``, push SIZE bytes of 0xFF again and again until that fails
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pkgutil import resolve_name

import numpy as np

from deeplink.errors import DeeplinkError
from deeplink.kvconnector.transport.base import Push, Transport

ANSWER_SECONDS = 40.0
LIFE_SECONDS = 300.0


class Peer:
    """The process, as its parent sees it. `address` is where its transport takes pushes."""

    def __init__(self, factory: str, secret: bytes, host: str = "127.0.0.1") -> None:
        # With this process's import path, which need not be what a fresh interpreter has.
        program = f"import sys; sys.path[:] = {sys.path!r}; from deeplink.testing.peer import main; main(*sys.argv[1:])"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, factory, host],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with contextlib.ExitStack() as undo:
            undo.callback(self.end)
            self.address = self.ask(secret.hex())
            undo.pop_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, command: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], ANSWER_SECONDS)
        assert ready, "the peer process does not answer"
        line = self._process.stdout.readline()
        assert line, "the peer process has ended"
        return line.strip()

    def region(self, size: int) -> bytes:
        """The key of `size` bytes of its memory."""
        return bytes.fromhex(self.ask(f"region {size}"))

    def storm(self, address: str, key: bytes, size: int) -> None:
        assert self.ask(f"storm {address} {key.hex()} {size}") == "storming"

    def signal(self, number: int) -> None:
        send(self._process, number)

    def end(self) -> None:
        self._process.kill()
        self._process.wait(ANSWER_SECONDS)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def send(process: subprocess.Popen[str], number: int) -> None:
    """Send a signal. A stop is waited for until it has reached every thread: until then some of them still answer."""
    process.send_signal(number)
    end = time.monotonic() + ANSWER_SECONDS
    while number == signal.SIGSTOP and not os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG):
        assert time.monotonic() < end, "the process does not stop"
        time.sleep(0.001)


@contextlib.contextmanager
def peer(factory: str, secret: bytes, host: str = "127.0.0.1") -> Iterator[Peer]:
    made = Peer(factory, secret, host)
    try:
        yield made
    finally:
        made.end()


def main(factory: str, host: str) -> None:
    """The process itself."""
    # What a library prints goes elsewhere, or it would pass for an answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(text: str) -> None:
        print(text, file=answers, flush=True)

    transport: Transport = resolve_name(factory)(host, bytes.fromhex(sys.stdin.readline()))
    answer(transport.address)
    kept = []
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "region":
            memory = bytearray(int(arguments[0]))
            region = transport.register(memoryview(memory))
            kept.append((memory, region))
            answer(region.key.hex())
        elif command == "sum":
            answer(str(int(np.frombuffer(kept[int(arguments[0])][0], np.uint8).sum())))
        elif command == "tail":
            answer(kept[int(arguments[0])][0][-16:].hex())
        elif command == "storm":
            address, key, size = arguments[0], bytes.fromhex(arguments[1]), int(arguments[2])
            _storm(transport, address, key, size, answer)


def _storm(transport: Transport, address: str, key: bytes, size: int, answer: Callable[[str], None]) -> None:
    end = time.monotonic() + LIFE_SECONDS
    source = memoryview(b"\xff" * size)
    link = transport.connect(address, end)
    answer("storming")
    with contextlib.suppress(DeeplinkError):  # the region is withdrawn some time
        while True:
            link.push([Push(source, key, 0)], end)
    link.close()
