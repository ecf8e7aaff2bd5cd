"""Pushes by a one-sided library under kvconnector, beside the same library driven directly.

4096 pieces of 32 KiB, from places in order to scattered ones in another process, in one push. Driven directly means the
library's own calls on lists that are there already, with nothing said to the peer: for NIXL one transfer, for
Mooncake its batch call, 1000 pieces at a time, which is what its queue holds.

Both write into memory as a bytearray has it: what numpy allocates has huge pages, to which NIXL writes 1.6 times
faster.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np

from deeplink.bench.child import Answer, Child, Message, child, load
from deeplink.bench.engine import SECRET
from deeplink.bench.rows import Row, Skipped
from deeplink.bench.scale import Scale
from deeplink.bench.timing import take_turns
from deeplink.errors import ConfigError
from deeplink.kvconnector.transport import mooncake, nixl
from deeplink.kvconnector.transport.base import Push

HOST, BLOCK, TOKENS = "127.0.0.1", 32 << 10, 16
SECONDS = 60.0
GOAL = 0.95
PAUSE = 1e-4
QUEUE = 1000
Run = Callable[[], None]
ROWS = {
    "nixl": "deeplink.kvconnector.transport.nixl:NixlTransport",
    "mooncake": "deeplink.kvconnector.transport.mooncake:MooncakeTransport",
}


def measure(wanted: Collection[str], scale: Scale) -> Iterator[Row | Skipped]:
    for name, factory in ROWS.items():
        if name in wanted:
            try:
                yield _measure(name, factory, scale)
            except ConfigError as exc:
                yield Skipped(name, str(exc))


def _measure(name: str, factory: str, scale: Scale) -> Row:
    count = scale.tokens // TOKENS * 32
    size = count * BLOCK
    places = np.random.default_rng(0).permutation(count) * BLOCK
    source = np.random.default_rng(0).integers(0, 256, size, np.uint8).data
    with ExitStack() as stack:
        here = load(factory)(HOST, SECRET)
        stack.callback(here.close)
        here.stage(source)
        there = stack.enter_context(child("deeplink.bench.libraries:receiver", factory, str(size)))
        bare = stack.enter_context(child(f"deeplink.bench.libraries:{name}_target", str(size)))
        said = there.ask()
        link = here.connect(said["address"], time.monotonic() + SECONDS)
        stack.callback(link.close)
        key = bytes.fromhex(said["key"])
        starts = range(0, size, BLOCK)
        pushes = [Push(source[a : a + BLOCK], key, int(b)) for a, b in zip(starts, places, strict=True)]
        direct = {"nixl": _nixl_direct, "mooncake": _mooncake_direct}[name](source, places, bare)
        actions: dict[str, Run] = {
            "ours": lambda: link.push(pushes, time.monotonic() + SECONDS),
            "direct": direct,
        }
        best = take_turns(actions, 3 * scale.rounds, [there.pid, bare.pid])
        return Row(
            name,
            best["ours"].per_second(size / 1e9),
            "GB/s",
            f"{name} driven directly",
            best["direct"].per_second(size / 1e9),
            GOAL,
            "at least",
            cpu_s_per_gb=best["ours"].cpu / size * 1e9,
            mark_cpu_s_per_gb=best["direct"].cpu / size * 1e9,
        )


def receiver(factory: str, size: str) -> Answer:
    """The process with the transport that takes the pushes."""
    transport = load(factory)(HOST, SECRET)
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


def _nixl_direct(source: memoryview, places: Any, bare: Child) -> Run:
    said = bare.ask()
    agent = _nixl_agent(source.nbytes, source)
    peer = agent.add_remote_agent(bytes.fromhex(said["metadata"]))
    starts = np.arange(len(places), dtype=np.uint64) * np.uint64(BLOCK)
    lengths, zeros = np.full(len(places), BLOCK, np.uint64), np.zeros(len(places), np.uint64)
    local = np.stack([starts + np.uint64(_address(source)), lengths, zeros], 1)
    remote = np.stack([places.astype(np.uint64) + np.uint64(said["base"]), lengths, zeros], 1)

    def run() -> None:
        lists = agent.get_xfer_descs(local, "DRAM"), agent.get_xfer_descs(remote, "DRAM")
        handle = agent.initialize_xfer("WRITE", *lists, peer)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL: {state}")
        agent.release_xfer_handle(handle)

    return run


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


def _mooncake_direct(source: memoryview, places: Any, bare: Child) -> Run:
    said = bare.ask()
    engine, base = _mooncake_engine(source.nbytes, source), _address(source)
    ours = [base + index * BLOCK for index in range(len(places))]
    theirs = [said["base"] + int(place) for place in places]

    def run() -> None:
        for first in range(0, len(ours), QUEUE):
            some = slice(first, first + QUEUE)
            lengths = [BLOCK] * len(ours[some])
            code = engine.batch_transfer_sync_write(said["session"], ours[some], theirs[some], lengths)
            if code:
                raise RuntimeError(f"Mooncake: code {code}")

    return run
