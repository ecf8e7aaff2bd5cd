"""Pushes by one-sided libraries under kvconnector, beside the same library driven directly in the same run.

    make fabric; .venv/bin/python benchmarks/fabric.py [--json] [--save] [--rounds N] [--only nixl|mooncake]

Into another process on this host: 4096 pieces of 32 KiB to scattered places, in one push; and 16 chunks of 8 MiB, a
push each, as a handoff makes them. Driven directly means its own calls on lists that are there already, with nothing
said to the peer: for NIXL one transfer per list, for Mooncake its batch call, 1000 pieces at a time. The two take
turns, and the best round of each counts. UCX_TLS chooses what NIXL goes over. Mooncake needs libibverbs.so.1 on the
loader's path; `make fabric` may have put it under .venv/fabric.

A push costs 0.1 to 0.2 ms of conversation, which is 12 % of what NIXL takes to copy 8 MiB within a host, and nothing
beside a network; so the chunks have no goal.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from rows import RESULTS, Row, machine, table, write_table
from transports import Best, Case

from deeplink.errors import ConfigError
from deeplink.kvconnector.transport import nixl
from deeplink.kvconnector.transport.base import Push, Transport
from deeplink.testing.peer import load, peer

SECRET = b"a secret for benchmarks, 32 byte"
BLOCK, BLOCKS, CHUNK = 32 << 10, 4096, 8 << 20
SIZE = BLOCK * BLOCKS
SECONDS = 60.0
GOAL = 0.95
MOONCAKE_QUEUE = 1000

Lists = list[list[tuple[int, int, int]]]
"""Of each push, its pieces: offset in the source, offset in the target, length."""

Run = Callable[[Lists], None]


def lists(case: str) -> Lists:
    if case == "16x8m":
        return [[(start, start, CHUNK)] for start in range(0, SIZE, CHUNK)]
    places = np.random.default_rng(0).permutation(BLOCKS) * BLOCK
    return [[(index * BLOCK, place, BLOCK) for index, place in enumerate(places.tolist())]]


class NixlTarget:
    """Where the library writes when it is driven directly: named like a transport so that `peer` runs it."""

    def __init__(self, host: str, secret: bytes) -> None:
        self.memory = _memory()
        self.agent = _nixl_agent()
        self.agent.register_memory([(self.memory.ctypes.data, SIZE, 0, "")], "DRAM")
        self.address = f"{self.agent.get_agent_metadata().hex()} {self.memory.ctypes.data}"
        threading.Thread(target=self._progress, daemon=True).start()

    def _progress(self) -> None:
        while True:
            self.agent.get_new_notifs()
            time.sleep(1e-4)


def _memory() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """As the peer of a transport has it. What numpy allocates has huge pages, to which NIXL writes 1.6 times faster."""
    return np.frombuffer(bytearray(SIZE), np.uint8)


def _nixl_agent() -> Any:
    api = nixl.load()
    return api.nixl_agent(f"bench-{secrets.token_hex(4)}", api.nixl_agent_config(False, backends=["UCX"]))


def nixl_direct(source: memoryview, address: str) -> Run:
    metadata, base = address.split()
    agent, ours, theirs = _nixl_agent(), np.frombuffer(source, np.uint8).ctypes.data, int(base)
    agent.register_memory([(ours, SIZE, 0, "")], "DRAM")
    peer_name = agent.add_remote_agent(bytes.fromhex(metadata))
    kept: dict[int, Any] = {}

    def run(pushes: Lists) -> None:
        for pieces in pushes:
            rows = kept.get(id(pieces))
            if rows is None:
                rows = kept[id(pieces)] = np.array(pieces, np.uint64), pieces
            offsets = rows[0]
            zeros = np.zeros(len(offsets), np.uint64)
            local = np.stack([offsets[:, 0] + np.uint64(ours), offsets[:, 2], zeros], 1)
            remote = np.stack([offsets[:, 1] + np.uint64(theirs), offsets[:, 2], zeros], 1)
            handle = agent.initialize_xfer(
                "WRITE", agent.get_xfer_descs(local, "DRAM"), agent.get_xfer_descs(remote, "DRAM"), peer_name
            )
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            assert state == "DONE", state
            agent.release_xfer_handle(handle)

    return run


class MooncakeTarget:
    def __init__(self, host: str, secret: bytes) -> None:
        from mooncake.engine import TransferEngine

        self.memory = _memory()
        self.engine = TransferEngine()
        assert self.engine.initialize(host, "P2PHANDSHAKE", "tcp", "") == 0
        assert self.engine.register_memory(self.memory.ctypes.data, SIZE) == 0
        self.address = f"{host}:{self.engine.get_rpc_port()} {self.memory.ctypes.data}"


def mooncake_direct(source: memoryview, address: str) -> Run:
    from mooncake.engine import TransferEngine

    session, base = address.split()
    engine, ours, theirs = TransferEngine(), np.frombuffer(source, np.uint8).ctypes.data, int(base)
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(ours, SIZE) == 0

    def run(pushes: Lists) -> None:
        for pieces in pushes:
            for first in range(0, len(pieces), MOONCAKE_QUEUE):
                some = pieces[first : first + MOONCAKE_QUEUE]
                code = engine.batch_transfer_sync_write(
                    session,
                    [ours + start for start, _, _ in some],
                    [theirs + place for _, place, _ in some],
                    [length for _, _, length in some],
                )
                assert code == 0, code

    return run


LIBRARIES: dict[str, tuple[str, str, Callable[[memoryview, str], Run]]] = {
    "nixl": ("deeplink.kvconnector.transport.nixl:NixlTransport", "fabric:NixlTarget", nixl_direct),
    "mooncake": ("deeplink.kvconnector.transport.mooncake:MooncakeTransport", "fabric:MooncakeTarget", mooncake_direct),
}
CASES = {"4096x32k": "", "16x8m": "_16x8m"}
"""The names of the rows are the library's, for the first list alone."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/fabric.json and README.md's table"
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--only", choices=LIBRARIES)
    arguments = parser.parse_args()
    about = machine()
    rows: list[Row] = []
    for name in [arguments.only] if arguments.only else LIBRARIES:
        try:
            rows += measure(name, arguments.rounds)
        except ConfigError as exc:
            print(f"{name} is left out: {exc}", file=sys.stderr)
    result: dict[str, Any] = {"machine": about, "rows": [row.as_json() for row in rows]}
    if arguments.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "fabric.json").write_text(json.dumps(result, indent=2) + "\n")
        write_table("fabric", result)
    print(json.dumps(result, indent=2) if arguments.json else table(result["rows"]))


def measure(name: str, rounds: int) -> list[Row]:
    factory, target, direct = LIBRARIES[name]
    source = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8).data
    rows = []
    with ExitStack() as stack:
        here: Transport = load(factory)("127.0.0.1", SECRET)
        stack.callback(here.close)
        here.stage(source)
        there, bare = stack.enter_context(peer(factory, SECRET)), stack.enter_context(peer(target, SECRET))
        key = there.region(SIZE)
        link = here.connect(there.address, time.monotonic() + SECONDS)
        stack.callback(link.close)
        run_direct = direct(source, bare.address)
        for list_, suffix in CASES.items():
            wanted = lists(list_)
            made = [[Push(source[a : a + size], key, b) for a, b, size in pieces] for pieces in wanted]

            def ours(made: Sequence[Sequence[Push]] = made) -> None:
                for pushes in made:
                    link.push(pushes, time.monotonic() + SECONDS)

            mark = f"{name}_direct{suffix}"
            cases = [
                Case(f"{name}{suffix}", SIZE, ours, (there.pid,)),
                Case(mark, SIZE, lambda wanted=wanted: run_direct(wanted), (bare.pid,)),  # type: ignore[misc]
            ]
            best = [Best(), Best()]
            for case in cases:
                case.run()  # touches the memory and connects
            for _ in range(rounds):
                for case, figure in zip(cases, best, strict=True):
                    figure.take(case)
            goal, cost = None if suffix else GOAL, best[0].cpu_s_per_gb
            rows.append(
                Row(
                    cases[0].name, best[0].gb_per_s, "GB/s", mark, best[1].gb_per_s, goal, "at least", cpu_s_per_gb=cost
                )
            )
    return rows


if __name__ == "__main__":
    main()
