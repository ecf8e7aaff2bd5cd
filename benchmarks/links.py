"""Pushes of the transport tcp over emulated links, beside a plain socket on the same link. Linux, as root.

    python benchmarks/links.py [--json] [--save] [--rounds N] [--streams N …] [NAME …]

The links are those of `netlink`, with an MTU of 9000. A push is 128 MiB in blocks of 32 KiB, in chunks of 8 MiB as a
handoff has them, each posted before the answer to the last; the plain socket sends as many bytes with sendall of
1 MiB. Both have been connected before and take turns; the best round counts. The mark of the first link is its line
rate, of which the headers leave 99.3 % to the payload. With `--streams` tcp is measured with each of those numbers of
streams too.
"""

from __future__ import annotations

import argparse
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import sink
from netlink import Line, Namespace, between
from rows import RESULTS, Row, machine, table, write_table

from deeplink.kvconnector.transport.base import Push
from deeplink.kvconnector.transport.tcp import TcpTransport
from deeplink.testing.peer import peer

SECRET = b"a secret for benchmarks, 32 byte"
SIZE, CHUNK, BLOCK = 128 << 20, 8 << 20, 32 << 10
SECONDS = 120.0
GOAL = 0.97
LINES = {
    "link_1gbit": Line(1000),
    "link_500mbit_10ms": Line(500, delay_ms=10),
    "link_500mbit_10ms_loss": Line(500, delay_ms=10, loss=0.005),
}
AT_LINE_RATE = "link_1gbit"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(LINES), help="only these links")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--save", action="store_true", help="write results/links.json and README.md's table")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--streams", type=int, nargs="*", default=[])
    arguments = parser.parse_args()
    about = machine()
    rows = [row.as_json() for name in arguments.names for row in _measure(name, arguments.rounds, arguments.streams)]
    result = {"machine": about, "rows": rows}
    if arguments.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "links.json").write_text(json.dumps(result, indent=2) + "\n")
        write_table("links", result)
    print(json.dumps(result, indent=2) if arguments.json else table(rows))


def _measure(name: str, rounds: int, streams: list[int]) -> Iterator[Row]:
    source = memoryview(np.random.default_rng(0).bytes(SIZE))
    best: dict[str, float] = {}
    with between(LINES[name]) as net, ExitStack() as stack:
        cases = {"socket": stack.enter_context(_socket(net.a, net.b, source))}
        for count in [0, *streams]:
            case = stack.enter_context(_push(net.a, net.b, source, count))
            cases[f"{name}_{count}streams" if count else name] = case
        for _ in range(rounds):
            for label, run in cases.items():
                began = time.perf_counter()
                run()
                speed = SIZE * 8 / (time.perf_counter() - began) / 1e6
                best[label] = max(best.get(label, 0.0), speed)
    plain = best.pop("socket")
    if name == AT_LINE_RATE:
        rate = LINES[name].rate_mbit
        yield Row(f"{name}_socket", plain, "Mbit/s", "line rate", rate)
        yield from (Row(label, speed, "Mbit/s", "line rate", rate, GOAL, "at least") for label, speed in best.items())
    else:
        yield from (Row(label, speed, "Mbit/s", "socket", plain, GOAL, "at least") for label, speed in best.items())


@contextmanager
def _push(here: Namespace, there: Namespace, source: memoryview, streams: int) -> Iterator[Callable[[], None]]:
    with ExitStack() as stack:
        with there.entered():
            receiver = stack.enter_context(
                peer("deeplink.kvconnector.transport.tcp:TcpTransport", SECRET, there.address)
            )
        key = receiver.region(SIZE)
        with here.entered():
            transport = TcpTransport(here.address, SECRET, streams=streams)
            stack.callback(transport.close)
            link = transport.connect(receiver.address, time.monotonic() + SECONDS)
        stack.callback(link.close)
        pushes = [Push(source[place : place + BLOCK], key, place) for place in range(0, SIZE, BLOCK)]
        chunks = [pushes[first : first + CHUNK // BLOCK] for first in range(0, len(pushes), CHUNK // BLOCK)]

        def run() -> None:
            deadline = time.monotonic() + SECONDS
            before = link.post(chunks[0], deadline)
            for chunk in chunks[1:]:
                after = link.post(chunk, deadline)
                before(deadline)
                before = after
            before(deadline)

        yield run


class Sink(sink.Sink):
    size = SIZE


@contextmanager
def _socket(here: Namespace, there: Namespace, source: memoryview) -> Iterator[Callable[[], None]]:
    with ExitStack() as stack:
        with there.entered():
            sink = stack.enter_context(peer("links:Sink", SECRET, there.address))
        host, _, port = sink.address.rpartition(":")
        with here.entered():
            sock = stack.enter_context(socket.create_connection((host, int(port)), SECONDS))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def run() -> None:
            for offset in range(0, SIZE, 1 << 20):
                sock.sendall(source[offset : offset + (1 << 20)])
            assert sock.recv(1) == b"\0"

        yield run


if __name__ == "__main__":
    main()
