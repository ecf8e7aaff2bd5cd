"""The move of the same blocks by vLLM's built-in NIXL connector, beside ours.

The connector itself needs an engine around it, so the library is driven here as its pull worker (vLLM 0.32) drives it:
an agent with its default of 4 threads and their polling, both caches registered as they are, a list of descriptors
prepared once per side for all blocks, and per request one READ of the block list with a notification, looked at until
it is done. What it does not do: check the bytes, convert between layouts, or keep the peer out of its cache.

The mark is the row `shm_4096x32k` of the same run: our handoff of as many blocks, without digests.
"""

from __future__ import annotations

import secrets
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
    with ExitStack() as stack:
        ours = stack.enter_context(pair(shape, shape))
        block, count = shape.bytes // shape.layers // 2 // shape.blocks, shape.layers * 2 * shape.blocks
        there = stack.enter_context(child("deeplink.bench.builtin:prefill", str(shape.bytes), str(block)))
        said = there.ask()
        cache = np.zeros(shape.bytes, np.uint8)
        agent = _agent(cache)
        peer = agent.add_remote_agent(bytes.fromhex(said["metadata"]))
        local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", _descriptors(agent, cache.ctypes.data, block, count))
        remote = agent.prep_xfer_dlist(peer, _descriptors(agent, said["base"], block, count))
        from_, to = np.random.default_rng(1).permutation(count), np.random.default_rng(2).permutation(count)

        def read() -> None:
            handle = agent.make_prepped_xfer("READ", local, to, remote, from_, notif_msg=b"request:1")
            agent.transfer(handle)
            while (state := agent.check_xfer_state(handle)) == "PROC":
                pass
            if state != "DONE":
                raise RuntimeError(f"NIXL: {state}")
            agent.release_xfer_handle(handle)

        best = take_turns(
            {"builtin": read, "ours": ours.hand_over}, loopback.ROUNDS * scale.rounds, [there.pid, ours.there.pid]
        )
        # Each block there is full of its number, so a wrong one shows.
        if not np.array_equal(cache.reshape(count, block)[to, 0], (from_ % 251).astype(np.uint8)):
            raise RuntimeError("NIXL has not read the blocks that were asked for")
        speed = {name: found.per_second(shape.bytes / 1e9) for name, found in best.items()}
        cost = best["builtin"].cpu / shape.bytes * 1e9
        mark = "deeplink: shm_4096x32k"
        yield Row(ROWS[0], speed["builtin"], "GB/s", mark, speed["ours"], cpu_s_per_gb=cost)


def prefill(size: str, block: str) -> Answer:
    """The process whose cache is read."""
    blocks = int(size) // int(block)
    cache = np.repeat((np.arange(blocks) % 251).astype(np.uint8), int(block))
    agent = _agent(cache)

    def answer(question: Message) -> Message:
        return {"metadata": agent.get_agent_metadata().hex(), "base": cache.ctypes.data}

    return answer


def _agent(cache: Any) -> Any:
    api = nixl.load()
    agent = api.nixl_agent(f"bench-{secrets.token_hex(4)}", api.nixl_agent_config(num_threads=THREADS))
    agent.register_memory([(cache.ctypes.data, cache.nbytes, 0, "")], "DRAM")
    return agent


def _descriptors(agent: Any, base: int, block: int, count: int) -> Any:
    starts = np.arange(count, dtype=np.uint64) * np.uint64(block) + np.uint64(base)
    rows = np.stack([starts, np.full(count, block, np.uint64), np.zeros(count, np.uint64)], 1)
    return agent.get_xfer_descs(rows, "DRAM")
