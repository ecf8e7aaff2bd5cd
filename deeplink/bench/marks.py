"""What the machine can do: the marks that figures stand beside."""

from __future__ import annotations

import contextlib
import mmap
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

import numpy as np
import numpy.typing as npt
import xxhash

from deeplink.bench.child import Answer, Child, Message, child

RING = 4 << 20
"""Bytes of the shared segment: what is copied out of it is still in the processor's cache."""
SEND = 1 << 20
CHUNK = 8 << 20
"""Bytes that are staged at once: the default of deeplink.toml."""
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


def through_staging(
    source: Bytes, target: Bytes, block: int, ours: Sequence[int], theirs: Sequence[int]
) -> Callable[[], None]:
    """As `through_shared`, but through staging as large as all of it, in chunks, and with a thread for each of the two
    copies: what is left of the mark when nothing may be copied out of the processor's cache."""
    segment = np.frombuffer(mmap.mmap(-1, len(ours) * block), np.uint8)
    chunks = [range(first, min(first + CHUNK // block, len(ours))) for first in range(0, len(ours), CHUNK // block)]

    def copy_in(chunk: range) -> None:
        for place in chunk:
            at = ours[place] * block
            np.copyto(segment[place * block : (place + 1) * block], source[at : at + block])

    def copy_out(chunk: range) -> None:
        for place in chunk:
            at = theirs[place] * block
            np.copyto(target[at : at + block], segment[place * block : (place + 1) * block])

    return lambda: _one_behind(chunks, copy_in, copy_out)


def _one_behind(chunks: Sequence[range], first: Callable[[range], None], then: Callable[[range], None]) -> None:
    """Each chunk through `first` and then, in a thread of its own, through `then`."""
    ready: deque[range] = deque()
    told = threading.Semaphore(0)

    def follow() -> None:
        for _ in chunks:
            told.acquire(timeout=SECONDS)
            then(ready.popleft())

    follower = threading.Thread(target=follow)
    follower.start()
    for chunk in chunks:
        first(chunk)
        ready.append(chunk)
        told.release()
    follower.join(SECONDS)


def sink(host: str, size: str, staged: str = "") -> Answer:
    """The other end of the plain socket, in a process of its own: it takes `size` bytes and answers one, for ever. With
    `staged` it computes the checksum of what has come, and copies it once more in a thread of its own."""
    listening = socket.create_server((host, 0))
    target = memoryview(bytearray(int(size)))
    copy = np.zeros(int(size), np.uint8) if staged else None

    def receive(sock: socket.socket, part: range) -> None:
        for offset in range(part.start, part.stop, SEND) if staged else [part.start]:
            piece = left = target[offset : min(offset + SEND, part.stop) if staged else part.stop]
            while left:
                count = sock.recv_into(left)
                if count == 0:
                    raise ConnectionError("the other end is gone")
                left = left[count:]
            if staged:
                xxhash.xxh3_64_intdigest(piece)

    def copy_out(part: range) -> None:
        if copy is not None:
            np.copyto(copy[part.start : part.stop], np.frombuffer(target[part.start : part.stop], np.uint8))

    def take(sock: socket.socket) -> None:
        while True:
            if copy is None:
                receive(sock, range(int(size)))
            else:
                _one_behind(_parts(int(size)), lambda part: receive(sock, part), copy_out)
            sock.sendall(b"\0")

    def serve() -> None:
        with contextlib.suppress(OSError):
            take(listening.accept()[0])

    threading.Thread(target=serve, daemon=True).start()

    def answer(question: Message) -> Message:
        return {"port": listening.getsockname()[1]}

    return answer


def _parts(size: int) -> list[range]:
    return [range(first, min(first + CHUNK, size)) for first in range(0, size, CHUNK)]


@contextlib.contextmanager
def plain_socket(
    size: int,
    host: str = "127.0.0.1",
    here: AbstractContextManager[None] | None = None,
    there: AbstractContextManager[None] | None = None,
    *,
    staged: bool = False,
) -> Iterator[tuple[Callable[[], None], Child]]:
    """`size` bytes out of one buffer here with sendall, into one buffer of another process with recv_into. `here` and
    `there` are entered while an end is made. With `staged` each side computes a checksum, and copies all of it once
    more, in a thread of its own."""
    source = memoryview(np.random.default_rng(0).bytes(size))
    staging = np.zeros(size if staged else 0, np.uint8)
    with ExitStack() as stack:
        with there or nullcontext():
            other = stack.enter_context(
                child("deeplink.bench.marks:sink", host, str(size), *(["staged"] if staged else []))
            )
            port = other.ask()["port"]
        with here or nullcontext():
            sock = stack.enter_context(socket.create_connection((host, port), SECONDS))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def copy_in(part: range) -> None:
            np.copyto(staging[part.start : part.stop], np.frombuffer(source[part.start : part.stop], np.uint8))

        def send(part: range) -> None:
            for offset in range(part.start, part.stop, SEND):
                piece = (staging.data if staged else source)[offset : min(offset + SEND, part.stop)]
                if staged:
                    xxhash.xxh3_64_intdigest(piece)
                sock.sendall(piece)

        def run() -> None:
            if staged:
                _one_behind(_parts(size), copy_in, send)
            else:
                send(range(size))
            if sock.recv(1) != b"\0":
                raise ConnectionError("the other end of the plain socket is gone")

        yield run, other
