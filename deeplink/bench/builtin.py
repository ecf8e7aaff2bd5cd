"""The move of the same blocks by vLLM's built-in NIXL connector, beside ours.

The connector itself needs an engine around it, so the library is driven here as its pull worker (vLLM 0.32) drives it:
an agent with its default of 4 threads and their polling, both caches registered as they are, a list of descriptors
prepared once per side for all blocks, and per request one READ of the block list with a notification, looked at until
it is done. What it does not do: check the bytes, convert between layouts, or keep the peer out of its cache.

The mark is the row `shm_4096x32k` of the same run: our handoff of as many blocks, without digests. The polling would
take the cores from it, so both processes of the connector are stopped meanwhile.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np

from deeplink.bench import loopback
from deeplink.bench.child import Answer, Message, child
from deeplink.bench.handoff import pair
from deeplink.bench.rows import Row, Skipped
from deeplink.bench.scale import Scale
from deeplink.bench.timing import take_turns
from deeplink.errors import ConfigError
from deeplink.kvconnector.transport import nixl

ROWS = ("builtin_nixl",)
THREADS = 4


def measure(wanted: Collection[str], scale: Scale) -> Iterator[Row | Skipped]:
    try:
        nixl.load()
    except ConfigError as exc:
        yield Skipped(ROWS[0], str(exc))
        return
    shape = loopback.shape(scale, "shm", digest=False)
    count = shape.layers * 2 * shape.blocks
    with ExitStack() as stack:
        ours = stack.enter_context(pair(shape, shape))
        prefill = stack.enter_context(child("deeplink.bench.builtin:prefill", str(shape.bytes), str(count)))
        decode = stack.enter_context(child("deeplink.bench.builtin:decode", str(shape.bytes), str(count)))
        decode.ask(**prefill.ask())

        def stop(number: int) -> None:
            for process in (prefill, decode):
                os.kill(process.pid, number)

        def read() -> float:
            stop(signal.SIGCONT)
            try:
                return float(decode.ask()["seconds"])
            finally:
                stop(signal.SIGSTOP)

        others = [prefill.pid, decode.pid, ours.there.pid]
        best = take_turns({"builtin": read, "ours": ours.hand_over}, loopback.ROUNDS * scale.rounds, others)
        speed = {name: found.per_second(shape.bytes / 1e9) for name, found in best.items()}
        costs = [best[name].cpu / shape.bytes * 1e9 for name in ("builtin", "ours")]
        yield Row(
            ROWS[0],
            speed["builtin"],
            "GB/s",
            "deeplink: shm_4096x32k",
            speed["ours"],
            cpu_s_per_gb=costs[0],
            mark_cpu_s_per_gb=costs[1],
        )


def prefill(size: str, count: str) -> Answer:
    """The process whose cache is read. Each block is full of its number, so that a wrong one shows."""
    numbers = (np.arange(int(count)) % 251).astype(np.uint8)
    cache = np.repeat(numbers, int(size) // int(count))
    agent = _agent(cache)

    def answer(question: Message) -> Message:
        return {"metadata": agent.get_agent_metadata().hex(), "base": cache.ctypes.data}

    return answer


def decode(size: str, count: str) -> Answer:
    """The process that reads: first it is told of the other one, then it is asked to read all blocks, and says how
    long that took."""
    cache = np.zeros(int(size), np.uint8)
    agent = _agent(cache)
    total, block = int(count), int(size) // int(count)
    here, there = (np.random.default_rng(seed).permutation(total) for seed in (2, 1))
    sides: list[Any] = []

    def answer(question: Message) -> Message:
        if question:
            peer = agent.add_remote_agent(bytes.fromhex(question["metadata"]))
            sides.append(agent.prep_xfer_dlist("NIXL_INIT_AGENT", _blocks(agent, cache.ctypes.data, block, total)))
            sides.append(agent.prep_xfer_dlist(peer, _blocks(agent, question["base"], block, total)))
            return {}
        began = time.perf_counter()
        handle = agent.make_prepped_xfer("READ", sides[0], here, sides[1], there, notif_msg=b"request:1")
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        seconds = time.perf_counter() - began
        agent.release_xfer_handle(handle)
        if state != "DONE" or not np.array_equal(cache.reshape(total, block)[here, 0], there % 251):
            raise RuntimeError(f"NIXL has not read the blocks that were asked for: {state}")
        return {"seconds": seconds}

    return answer


def _agent(cache: Any) -> Any:
    api = nixl.load()
    agent = api.nixl_agent(f"bench-{secrets.token_hex(4)}", api.nixl_agent_config(num_threads=THREADS))
    agent.register_memory([(cache.ctypes.data, cache.nbytes, 0, "")], "DRAM")
    return agent


def _blocks(agent: Any, base: int, block: int, count: int) -> Any:
    starts = np.arange(count, dtype=np.uint64) * np.uint64(block) + np.uint64(base)
    rows = np.stack([starts, np.full(count, block, np.uint64), np.zeros(count, np.uint64)], 1)
    return agent.get_xfer_descs(rows, "DRAM")
