"""Blocks to blocks between two processes of one host, same layout on both sides.

4096 blocks of 32 KiB (16 tokens of K or V of one layer), scattered in both caches, token before head. A handoff has
everything inside that `handoff.Pair.hand_over` says. The rows with `_digest` verify every tile, which is the default of
deeplink.toml; their marks do nothing of the kind, so they have no goal. tcp has its checksums on in all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack

import numpy as np

from deeplink.bench.engine import Shape
from deeplink.bench.handoff import Pair, pair
from deeplink.bench.marks import plain_socket, through_shared
from deeplink.bench.rows import Row
from deeplink.bench.scale import Scale
from deeplink.bench.timing import take_turns

LAYOUT = "kv block token head dim"
BLOCK = 16
ROUNDS = 3
"""For each that the scale asks for: a round takes a fraction of a second."""
GOALS = {"shm_4096x32k": 0.9, "tcp_loopback": 0.85}
ROWS = {
    "shm_4096x32k": ("shm", False),
    "shm_4096x32k_digest": ("shm", True),
    "tcp_loopback": ("tcp", False),
    "tcp_loopback_digest": ("tcp", True),
}
"""Transport, and whether what arrives is verified."""


def shape(scale: Scale, transport: str, digest: bool) -> Shape:
    return Shape(LAYOUT, BLOCK, scale.tokens, transport=transport, digest=digest)


def measure(wanted: Collection[str], scale: Scale) -> Iterator[Row]:
    for transport in ("shm", "tcp"):
        names = [name for name in ROWS if name in wanted and ROWS[name][0] == transport]
        if not names:
            continue
        with ExitStack() as stack:
            pairs: dict[str, Pair] = {}
            for name in names:
                side = shape(scale, *ROWS[name])
                pairs[name] = stack.enter_context(pair(side, side))
            others = [each.there.pid for each in pairs.values()]
            mark, run, extra = _mark(stack, transport, pairs[names[0]])
            actions = {mark: run, **{name: each.hand_over for name, each in pairs.items()}}
            best = take_turns(actions, ROUNDS * scale.rounds, [*others, *extra])
            for name, each in pairs.items():
                yield Row(
                    name,
                    best[name].per_second(each.bytes / 1e9),
                    "GB/s",
                    mark,
                    best[mark].per_second(each.bytes / 1e9),
                    GOALS.get(name),
                    "at least",
                    cpu_s_per_gb=best[name].cpu / each.bytes * 1e9,
                    mark_cpu_s_per_gb=best[mark].cpu / each.bytes * 1e9,
                    breakdown=each.breakdown(),
                    note=bound(best[name].cpu / each.bytes * 1e9),
                )


def bound(cost: float) -> str:
    """What the cost of a handoff, in CPU seconds per GB, leaves possible however well its threads share the cores."""
    cores = len(os.sched_getaffinity(0))
    return f"at this cost {cores} cores give at most {cores / cost:.1f} GB/s"


def _mark(stack: ExitStack, transport: str, of: Pair) -> tuple[str, Callable[[], None], list[int]]:
    if transport == "tcp":
        run, other = stack.enter_context(plain_socket(of.bytes))
        return "sendall and recv_into, one buffer", run, [other.pid]
    planes = of.ours.shape.layers * 2
    ours, theirs = (
        [plane * of.ours.shape.blocks + block for plane in range(planes) for block in table] for table in of.tables
    )
    source = np.random.default_rng(0).integers(0, 256, of.bytes, np.uint8)
    run = through_shared(source, np.zeros_like(source), of.bytes // len(ours), ours, theirs)
    return "copy into a shared segment and out", run, []
