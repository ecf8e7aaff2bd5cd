"""Pushes by a one-sided library under kvconnector, beside the same library driven directly.

4096 pieces of 32 KiB, from places in order to scattered ones in another process, in one push; and as a handoff makes
them, chunks of 8 MiB with a push each. Driven directly means the library's own calls on lists that are there already,
with nothing said to the peer: for NIXL one transfer per push, for Mooncake its batch call, 1000 pieces at a time, which
is what its queue holds.

A push costs 0.1 to 0.2 ms of conversation, which is 12 % of what NIXL takes to copy 8 MiB within a host, and nothing
beside a network; so the chunks have no goal.

Both write into memory as a bytearray has it: what numpy allocates has huge pages, to which NIXL writes 1.6 times
faster.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

import numpy as np
import numpy.typing as npt

from deeplink.bench.child import Answer, Child, Message, child
from deeplink.bench.engine import SECRET
from deeplink.bench.rows import Row, Skipped
from deeplink.bench.scale import Scale
from deeplink.bench.timing import take_turns
from deeplink.errors import ConfigError
from deeplink.kvconnector.transport import mooncake, nixl
from deeplink.kvconnector.transport.base import Link, Push

HOST, BLOCK, CHUNK, TOKENS = "127.0.0.1", 32 << 10, 8 << 20, 16
SECONDS = 60.0
GOAL = 0.95
PAUSE = 1e-4
QUEUE = 1000
Run = Callable[[], None]
Pieces = npt.NDArray[np.uint64]
"""Of one push: offset in the source, offset in the target, and length of each piece."""


@dataclass(frozen=True)
class Case:
    """`chunked`: a push for each chunk, in order; else one push of all blocks, to scattered places."""

    library: str
    goal: float | None = GOAL
    chunked: bool = False


CASES = {
    "nixl": Case("nixl"),
    "nixl_16x8m": Case("nixl", None, chunked=True),
    "mooncake": Case("mooncake"),
    "mooncake_16x8m": Case("mooncake", None, chunked=True),
}
"""16 of 8 MiB at the scale of 2048 tokens."""
ROWS = tuple(name for name, case in CASES.items() if case.goal is not None)
"""What `deeplink bench kv` has of them."""
FACTORIES = {
    "nixl": "deeplink.kvconnector.transport.nixl:NixlTransport",
    "mooncake": "deeplink.kvconnector.transport.mooncake:MooncakeTransport",
}


def measure(wanted: Collection[str], scale: Scale) -> Iterator[Row | Skipped]:
    for library, factory in FACTORIES.items():
        names = [name for name, case in CASES.items() if case.library == library and name in wanted]
        if names:
            try:
                yield from _measure(library, factory, names, scale)
            except ConfigError as exc:
                yield from (Skipped(name, str(exc)) for name in names)


def pushes_of(case: Case, size: int) -> list[Pieces]:
    piece = CHUNK if case.chunked else BLOCK
    starts = np.arange(0, size, piece)
    places = starts if case.chunked else np.random.default_rng(0).permutation(starts)
    pieces = np.stack([starts, places, np.full(len(starts), piece)], 1).astype(np.uint64)
    return [pieces[at : at + 1] for at in range(len(pieces))] if case.chunked else [pieces]


def _measure(library: str, factory: str, names: Collection[str], scale: Scale) -> list[Row]:
    size = scale.tokens // TOKENS * 32 * BLOCK
    source = np.random.default_rng(0).integers(0, 256, size, np.uint8).data
    rows = []
    with ExitStack() as stack:
        here = resolve_name(factory)(HOST, SECRET)
        stack.callback(here.close)
        here.stage(source)
        there = stack.enter_context(child("deeplink.bench.libraries:receiver", factory, str(size)))
        bare = stack.enter_context(child(f"deeplink.bench.libraries:{library}_target", str(size)))
        said = there.ask()
        link = here.connect(said["address"], time.monotonic() + SECONDS)
        stack.callback(link.close)
        direct = {"nixl": _nixl_direct, "mooncake": _mooncake_direct}[library](source, bare)
        for name in names:
            wanted = pushes_of(CASES[name], size)
            actions: dict[str, Run] = {
                "ours": _pushing(link, source, bytes.fromhex(said["key"]), wanted),
                "direct": direct(wanted),
            }
            best = take_turns(actions, 3 * scale.rounds, [there.pid, bare.pid])
            rows.append(
                Row(
                    name,
                    best["ours"].per_second(size / 1e9),
                    "GB/s",
                    f"{library} driven directly",
                    best["direct"].per_second(size / 1e9),
                    CASES[name].goal,
                    "at least",
                    cpu_s_per_gb=best["ours"].cpu / size * 1e9,
                    mark_cpu_s_per_gb=best["direct"].cpu / size * 1e9,
                )
            )
    return rows


def _pushing(link: Link, source: memoryview, key: bytes, wanted: list[Pieces]) -> Run:
    made = [[Push(source[a : a + size], key, b) for a, b, size in pieces.tolist()] for pieces in wanted]

    def run() -> None:
        for pushes in made:
            link.push(pushes, time.monotonic() + SECONDS)

    return run


def receiver(factory: str, size: str) -> Answer:
    """The process with the transport that takes the pushes."""
    transport = resolve_name(factory)(HOST, SECRET)
    memory = bytearray(int(size))
    region = transport.register(memoryview(memory))

    def answer(question: Message) -> Message:
        return {"address": transport.address, "key": region.key.hex()}

    return answer


def _address(memory: Any) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


# -- NIXL ----------------------------------------------------------------------------------------------------------


def _nixl_agent(size: int, memory: Any) -> Any:
    api = nixl.load()
    agent = api.nixl_agent(f"bench-{secrets.token_hex(4)}", api.nixl_agent_config(False, backends=["UCX"]))
    agent.register_memory([(_address(memory), size, 0, "")], "DRAM")
    return agent


def nixl_target(size: str) -> Answer:
    memory = bytearray(int(size))
    agent = _nixl_agent(len(memory), memory)

    def progress() -> None:
        while True:
            agent.get_new_notifs()
            time.sleep(PAUSE)

    threading.Thread(target=progress, daemon=True).start()

    def answer(question: Message) -> Message:
        return {"metadata": agent.get_agent_metadata().hex(), "base": _address(memory)}

    return answer


def _nixl_direct(source: memoryview, bare: Child) -> Callable[[list[Pieces]], Run]:
    said = bare.ask()
    agent = _nixl_agent(source.nbytes, source)
    peer = agent.add_remote_agent(bytes.fromhex(said["metadata"]))
    ours, theirs = np.uint64(_address(source)), np.uint64(said["base"])

    def prepared(wanted: list[Pieces]) -> Run:
        lists = []
        for pieces in wanted:
            zeros = np.zeros(len(pieces), np.uint64)
            local = np.stack([pieces[:, 0] + ours, pieces[:, 2], zeros], 1)
            lists.append((local, np.stack([pieces[:, 1] + theirs, pieces[:, 2], zeros], 1)))

        def run() -> None:
            for local, remote in lists:
                described = agent.get_xfer_descs(local, "DRAM"), agent.get_xfer_descs(remote, "DRAM")
                handle = agent.initialize_xfer("WRITE", *described, peer)
                state = agent.transfer(handle)
                while state == "PROC":
                    state = agent.check_xfer_state(handle)
                if state != "DONE":
                    raise RuntimeError(f"NIXL: {state}")
                agent.release_xfer_handle(handle)

        return run

    return prepared


# -- Mooncake ------------------------------------------------------------------------------------------------------


def _mooncake_engine(size: int, memory: Any) -> Any:
    engine = mooncake.load().TransferEngine()
    if engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") or engine.register_memory(_address(memory), size):
        raise ConfigError("Mooncake's engine does not start")
    return engine


def mooncake_target(size: str) -> Answer:
    memory = bytearray(int(size))
    engine = _mooncake_engine(len(memory), memory)

    def answer(question: Message) -> Message:
        return {"session": f"{HOST}:{engine.get_rpc_port()}", "base": _address(memory)}

    return answer


def _mooncake_direct(source: memoryview, bare: Child) -> Callable[[list[Pieces]], Run]:
    said = bare.ask()
    engine, base = _mooncake_engine(source.nbytes, source), _address(source)

    def prepared(wanted: list[Pieces]) -> Run:
        batches = []
        for pieces in wanted:
            for first in range(0, len(pieces), QUEUE):
                some = pieces[first : first + QUEUE].tolist()
                ours, theirs = [base + start for start, _, _ in some], [said["base"] + place for _, place, _ in some]
                batches.append((ours, theirs, [length for _, _, length in some]))

        def run() -> None:
            for batch in batches:
                code = engine.batch_transfer_sync_write(said["session"], *batch)
                if code:
                    raise RuntimeError(f"Mooncake: code {code}")

        return run

    return prepared
