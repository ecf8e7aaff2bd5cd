"""Pushes of kvconnector's transports into another process on this host, beside what bounds them.

    python benchmarks/transports.py [--json] [--save] [--rounds N] [--streams N] [NAME …]

Two lists of pieces: 4096 of 32 KiB to scattered places, and one of 256 MiB. Marks of the same run: memcpy of the same
pieces within one process; the same by way of a ring of shared memory, one copy in and one out; and a plain socket with
sendall of 1 MiB and recv_into one contiguous buffer. The cases take turns and the best round counts, so that what else
the machine does meets all of them; the CPU seconds are the least of any round. A name runs only the cases that begin
with it, and their marks. The pushes of tcp are also measured with `--streams` per link.
"""

from __future__ import annotations

import argparse
import json
import mmap
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import sink
from rows import RESULTS, Row, machine, table, write_table

from deeplink.kvconnector.transport.base import Link, Push, Transport
from deeplink.testing.peer import Peer, peer

SECRET = b"a secret for benchmarks, 32 byte"
BLOCK, BLOCKS, LARGE = 32 << 10, 4096, 256 << 20
SECONDS = 60.0
TRANSPORTS = {
    "shm": "deeplink.kvconnector.transport.shm:ShmTransport",
    "tcp": "deeplink.kvconnector.transport.tcp:TcpTransport",
}
GOALS = {("shm", "ring"): 0.9, ("tcp", "socket"): 0.85}
MARKS = {"socket": ("memcpy",), "ring": ("memcpy",), "shm": ("memcpy", "ring", "socket"), "tcp": ("memcpy", "socket")}
NAMES = {"shm_4096x32k": "shm_4096x32k", "tcp_4096x32k": "tcp_loopback"}
"""The case that each goal is about, and what its row is called."""
RING = 4 << 20

Pieces = list[tuple[int, int]]
"""Offset and length, the same in source and target."""


@dataclass(frozen=True)
class Case:
    """`others` are the processes that do their part of `run`."""

    name: str
    bytes: int
    run: Callable[[], None]
    others: tuple[int, ...] = ()


@dataclass
class Best:
    gb_per_s: float = 0.0
    cpu_s_per_gb: float = float("inf")

    def take(self, case: Case) -> None:
        cpu, began = _cpu(case), time.perf_counter()
        case.run()
        seconds = time.perf_counter() - began
        self.gb_per_s = max(self.gb_per_s, case.bytes / seconds / 1e9)
        self.cpu_s_per_gb = min(self.cpu_s_per_gb, (_cpu(case) - cpu) / case.bytes * 1e9)


def _cpu(case: Case) -> float:
    """Seconds that this process and the others have run; of the others, the threads that still live."""
    total = 0
    for process in case.others:
        for thread in Path(f"/proc/{process}/task").iterdir():
            total += int((thread / "schedstat").read_text().split()[0])
    return time.process_time() + total / 1e9


def pieces(case: str) -> Pieces:
    if case == "256m":
        return [(0, LARGE)]
    places = np.random.default_rng(0).permutation(BLOCKS) * BLOCK
    return [(place, BLOCK) for place in places.tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only these cases and their marks")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--save", action="store_true", help="write results/transports.json and README.md's table")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--streams", type=int, default=2)
    arguments = parser.parse_args()
    about = machine()
    with ExitStack() as stack:
        cases = [case for case in _cases(stack, arguments.streams) if _wanted(case.name, arguments.names)]
        best = {case.name: Best() for case in cases}
        for case in cases:
            case.run()  # only touches the memory
        for _ in range(arguments.rounds):
            for case in cases:
                best[case.name].take(case)
    result = {"machine": about, "rows": [row.as_json() for row in _rows(best)]}
    if arguments.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "transports.json").write_text(json.dumps(result, indent=2) + "\n")
        write_table("transports", result)
    print(json.dumps(result, indent=2) if arguments.json else table(result["rows"]))


def _wanted(name: str, names: Sequence[str]) -> bool:
    """Whether a case was asked for, or is a mark."""
    return (
        not names
        or name.partition("_")[0].rstrip("0123456789") not in TRANSPORTS
        or any(name.startswith(wanted) for wanted in names)
    )


def _rows(best: dict[str, Best]) -> Iterator[Row]:
    for name, figure in best.items():
        kind, _, case = name.partition("_")
        size = case if case == "4096x32k" else "256m"
        for mark in MARKS.get(kind.rstrip("0123456789"), ()):
            other = mark if mark in best else f"{mark}_{size}"
            about_goal = name in NAMES and (kind, mark) in GOALS
            yield Row(
                NAMES[name] if about_goal else name,
                figure.gb_per_s,
                "GB/s",
                other,
                best[other].gb_per_s,
                GOALS[kind, mark] if about_goal else None,
                "at least",
                cpu_s_per_gb=figure.cpu_s_per_gb,
            )


def _cases(stack: ExitStack, streams: int) -> list[Case]:
    source = memoryview(bytearray(np.random.default_rng(0).bytes(LARGE)))
    target = bytearray(LARGE)
    cases = []
    for name in ("4096x32k", "256m"):
        cases.append(_memcpy(f"memcpy_{name}", source, target, pieces(name)))
        cases.append(_ring(f"ring_{name}", source, target, pieces(name)))
    cases.append(_socket(stack, "socket", source))
    for kind, factory in TRANSPORTS.items():
        there = stack.enter_context(peer(factory, SECRET))
        key = there.region(LARGE)
        for label, options in {kind: {}, **({f"tcp{streams}": {"streams": streams}} if kind == "tcp" else {})}.items():
            here: Transport = resolve_name(factory)("127.0.0.1", SECRET, **options)
            stack.callback(here.close)
            for name in ("4096x32k", "256m"):
                cases.append(_push(stack, f"{label}_{name}", here, there, key, source, pieces(name)))
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
    size = sum(length for _, length in pieces)
    return Case(name, size, lambda: link.push(pushes, time.monotonic() + SECONDS), (there.pid,))


def _connect(stack: ExitStack, here: Transport, there: Peer) -> Link:
    link = here.connect(there.address, time.monotonic() + SECONDS)
    stack.callback(link.close)
    return link


class Sink(sink.Sink):
    size = LARGE


def _socket(stack: ExitStack, name: str, source: memoryview) -> Case:
    there = stack.enter_context(peer("transports:Sink", SECRET))
    host, _, port = there.address.rpartition(":")
    sock = stack.enter_context(socket.create_connection((host, int(port))))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def run() -> None:
        for offset in range(0, LARGE, 1 << 20):
            sock.sendall(source[offset : offset + (1 << 20)])
        assert sock.recv(1) == b"\0"

    return Case(name, LARGE, run, (there.pid,))


if __name__ == "__main__":
    main()
