"""Pushes of kvconnector's transports into another process on this host, beside what bounds them.

    python benchmarks/transports.py [--json] [--rounds N] [--links N]

Two lists of pieces: 4096 of 32 KiB to scattered places, and one of 256 MiB. Marks of the same run: memcpy of the same
pieces within one process; the same by way of a ring of shared memory, one copy in and one out; and a plain socket with
sendall of 1 MiB and recv_into one contiguous buffer. The cases take turns and the best round counts, so that what else
the machine does meets all of them. With `--links` the large push is
also split over that many links of tcp, each with a thread, to see whether more streams would be faster.
"""

from __future__ import annotations

import argparse
import json
import mmap
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from rows import Row, machine

from deeplink.kvconnector.transport.base import Link, Push, Transport
from deeplink.testing.peer import Peer, load, peer

SECRET = b"a secret for benchmarks, 32 byte"
BLOCK, BLOCKS, LARGE = 32 << 10, 4096, 256 << 20
SECONDS = 60.0
TRANSPORTS = {
    "shm": "deeplink.kvconnector.transport.shm:ShmTransport",
    "tcp": "deeplink.kvconnector.transport.tcp:TcpTransport",
}
GOALS = {("shm", "ring"): 0.9, ("tcp", "socket"): 0.85}
MARKS = {"socket": ("memcpy",), "ring": ("memcpy",), "shm": ("memcpy", "ring", "socket"), "tcp": ("memcpy", "socket")}
RING = 4 << 20

Pieces = list[tuple[int, int]]
"""Offset and length, the same in source and target."""


@dataclass(frozen=True)
class Case:
    name: str
    bytes: int
    run: Callable[[], None]


def pieces(case: str) -> Pieces:
    if case == "256m":
        return [(0, LARGE)]
    places = np.random.default_rng(0).permutation(BLOCKS) * BLOCK
    return [(place, BLOCK) for place in places.tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print only the result, as JSON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--links", type=int, default=2)
    arguments = parser.parse_args()
    about = machine()
    with ExitStack() as stack:
        cases = _cases(stack, arguments.links)
        best = {case.name: 0.0 for case in cases}
        for round_ in range(arguments.rounds + 1):
            for case in cases:
                began = time.perf_counter()
                case.run()
                speed = case.bytes / (time.perf_counter() - began) / 1e9
                if round_:  # the first only touches the memory
                    best[case.name] = max(best[case.name], speed)
    rows = list(_rows(best))
    if arguments.json:
        print(json.dumps({"machine": about, "rows": [row.as_json() for row in rows]}, indent=2))
        return
    for row in rows:
        mark = f"{row.mark_name} {row.mark:.2f}"
        print(f"{row.name:24} {row.value:6.2f} {row.unit}   {mark:24} {row.ratio:5.2f}", file=sys.stdout)


def _rows(best: dict[str, float]) -> Iterator[Row]:
    for name, speed in best.items():
        kind, _, case = name.partition("_")
        size = case if case == "4096x32k" else "256m"
        for mark in MARKS.get(kind, ()):
            other = mark if mark in best else f"{mark}_{size}"
            yield Row(name, speed, "GB/s", other, best[other], GOALS.get((kind, mark)), "at least")


def _cases(stack: ExitStack, links: int) -> list[Case]:
    source = memoryview(bytearray(np.random.default_rng(0).bytes(LARGE)))
    target = bytearray(LARGE)
    cases = []
    for name in ("4096x32k", "256m"):
        cases.append(_memcpy(f"memcpy_{name}", source, target, pieces(name)))
        cases.append(_ring(f"ring_{name}", source, target, pieces(name)))
    cases.append(_socket(stack, "socket", source))
    for transport, factory in TRANSPORTS.items():
        here: Transport = load(factory)("127.0.0.1", SECRET)
        stack.callback(here.close)
        there = stack.enter_context(peer(factory, SECRET))
        key = there.region(LARGE)
        for name in ("4096x32k", "256m"):
            cases.append(_push(stack, f"{transport}_{name}", here, there, key, source, pieces(name)))
        if transport == "tcp" and links > 1:
            cases.append(_split(stack, f"tcp_256m_{links}links", here, there, key, source, links))
    return cases


def _memcpy(name: str, source: memoryview, target: bytearray, pieces: Pieces) -> Case:
    ours, theirs = np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8)

    def run() -> None:
        for offset, length in pieces:
            np.copyto(theirs[offset : offset + length], ours[offset : offset + length])

    return Case(name, sum(length for _, length in pieces), run)


def _ring(name: str, source: memoryview, target: bytearray, pieces: Pieces) -> Case:
    ours, theirs = np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8)
    ring = np.frombuffer(mmap.mmap(-1, RING), np.uint8)

    def run() -> None:
        place = 0
        for start, length in pieces:
            for offset in range(start, start + length, 1 << 20):
                stop = min(offset + (1 << 20), start + length)
                slot = ring[place : place + stop - offset]
                np.copyto(slot, ours[offset:stop])
                np.copyto(theirs[offset:stop], slot)
                place = (place + slot.nbytes) % RING

    return Case(name, sum(length for _, length in pieces), run)


def _push(
    stack: ExitStack, name: str, here: Transport, there: Peer, key: bytes, source: memoryview, pieces: Pieces
) -> Case:
    link = _connect(stack, here, there)
    pushes = [Push(source[offset : offset + length], key, offset) for offset, length in pieces]
    return Case(name, sum(length for _, length in pieces), lambda: link.push(pushes, time.monotonic() + SECONDS))


def _split(
    stack: ExitStack, name: str, here: Transport, there: Peer, key: bytes, source: memoryview, count: int
) -> Case:
    links = [_connect(stack, here, there) for _ in range(count)]
    share = LARGE // count
    pushes = [[Push(source[index * share : (index + 1) * share], key, index * share)] for index in range(count)]

    def run() -> None:
        deadline = time.monotonic() + SECONDS
        threads = [
            threading.Thread(target=_push_all, args=(link, push, deadline))
            for link, push in zip(links, pushes, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return Case(name, share * count, run)


def _push_all(link: Link, pushes: Sequence[Push], deadline: float) -> None:
    link.push(pushes, deadline)


def _connect(stack: ExitStack, here: Transport, there: Peer) -> Link:
    link = here.connect(there.address, time.monotonic() + SECONDS)
    stack.callback(link.close)
    return link


class Sink:
    """What the plain socket's bytes go into, in the other process: named like a transport so that `peer` runs it."""

    def __init__(self, host: str, secret: bytes) -> None:
        self._socket = socket.create_server((host, 0))
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        sock, _ = self._socket.accept()
        target = memoryview(bytearray(LARGE))
        while True:
            left = target
            while left:
                count = sock.recv_into(left)
                if count == 0:
                    return
                left = left[count:]
            sock.sendall(b"\0")


def _socket(stack: ExitStack, name: str, source: memoryview) -> Case:
    there = stack.enter_context(peer("transports:Sink", SECRET))
    host, _, port = there.address.rpartition(":")
    sock = stack.enter_context(socket.create_connection((host, int(port))))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def run() -> None:
        for offset in range(0, LARGE, 1 << 20):
            sock.sendall(source[offset : offset + (1 << 20)])
        assert sock.recv(1) == b"\0"

    return Case(name, LARGE, run)


if __name__ == "__main__":
    main()
