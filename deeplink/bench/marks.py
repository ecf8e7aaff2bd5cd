"""What the machine can do: the marks that figures stand beside."""

from __future__ import annotations

import contextlib
import mmap
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

import numpy as np
import numpy.typing as npt

from deeplink.bench.child import Answer, Child, Message, child

RING = 4 << 20
"""Bytes of the shared segment: what is copied out of it is still in the processor's cache."""
SEND = 1 << 20
SECONDS = 120.0

Bytes = npt.NDArray[np.uint8]


def through_shared(
    source: Bytes, target: Bytes, block: int, ours: Sequence[int], theirs: Sequence[int]
) -> Callable[[], None]:
    """Blocks of `block` bytes: each of those that `ours` numbers is copied into a shared segment and out of it again,
    to where `theirs` says, one after the other, by one thread."""
    segment = np.frombuffer(mmap.mmap(-1, max(RING, block)), np.uint8)

    def run() -> None:
        place = 0
        for a, b in zip(ours, theirs, strict=True):
            if place + block > segment.nbytes:
                place = 0
            slot = segment[place : place + block]
            np.copyto(slot, source[a * block : (a + 1) * block])
            np.copyto(target[b * block : (b + 1) * block], slot)
            place += block

    return run


def sink(host: str, size: str) -> Answer:
    """The other end of the plain socket, in a process of its own: it takes `size` bytes and answers one, for ever."""
    listening = socket.create_server((host, 0))
    target = memoryview(bytearray(int(size)))

    def take(sock: socket.socket) -> None:
        while True:
            left = target
            while left:
                count = sock.recv_into(left)
                if count == 0:
                    return
                left = left[count:]
            sock.sendall(b"\0")

    def serve() -> None:
        with contextlib.suppress(OSError):
            take(listening.accept()[0])

    threading.Thread(target=serve, daemon=True).start()

    def answer(question: Message) -> Message:
        return {"port": listening.getsockname()[1]}

    return answer


@contextlib.contextmanager
def plain_socket(
    size: int,
    host: str = "127.0.0.1",
    here: AbstractContextManager[None] | None = None,
    there: AbstractContextManager[None] | None = None,
) -> Iterator[tuple[Callable[[], None], Child]]:
    """`size` bytes out of one buffer here with sendall, into one buffer of another process with recv_into. `here` and
    `there` are entered while an end is made."""
    source = memoryview(np.random.default_rng(0).bytes(size))
    with ExitStack() as stack:
        with there or nullcontext():
            other = stack.enter_context(child("deeplink.bench.marks:sink", host, str(size)))
            port = other.ask()["port"]
        with here or nullcontext():
            sock = stack.enter_context(socket.create_connection((host, port), SECONDS))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def run() -> None:
            for offset in range(0, size, SEND):
                sock.sendall(source[offset : offset + SEND])
            if sock.recv(1) != b"\0":
                raise ConnectionError("the other end of the plain socket is gone")

        yield run, other
