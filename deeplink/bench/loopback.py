"""Blocks to blocks between two processes of one host, same layout on both sides.

4096 blocks of 32 KiB (16 tokens of K or V of one layer), scattered in both caches, token before head. A handoff has
everything inside that `handoff.Pair.hand_over` says. The rows with `_digest` verify every tile, which is the default of
deeplink.toml; their marks do nothing of the kind, so they have no goal. tcp has its checksums on in all of them.

`shm_staging` and `tcp_staging` are no handoffs: they are the marks with nothing added but what a handoff has to do,
which is to stage the bytes (an engine's own blocks are never exposed) and for tcp to checksum them. They say how much
of the mark can be reached.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack

import numpy as np

from deeplink.bench.engine import Shape
from deeplink.bench.handoff import Pair, pair
from deeplink.bench.marks import plain_socket, through_shared, through_staging
from deeplink.bench.rows import Row
from deeplink.bench.scale import Scale
from deeplink.bench.timing import take_turns

LAYOUT = "kv block token head dim"
BLOCK = 16
ROUNDS = 3
"""For each that the scale asks for: a round takes a fraction of a second."""
GOALS = {"shm_4096x32k": 0.9, "tcp_loopback": 0.85}
HANDOFFS = {
    "shm_4096x32k": ("shm", False),
    "shm_4096x32k_digest": ("shm", True),
    "tcp_loopback": ("tcp", False),
    "tcp_loopback_digest": ("tcp", True),
}
"""Transport, and whether what arrives is verified."""
STAGED = {"shm": "shm_staging", "tcp": "tcp_staging"}
ROWS = (*HANDOFFS, *STAGED.values())
STAGING = "the mark with two more copies, in threads of their own: what a handoff must do at least"


def shape(scale: Scale, transport: str, digest: bool) -> Shape:
    return Shape(LAYOUT, BLOCK, scale.tokens, transport=transport, digest=digest)


def measure(wanted: Collection[str], scale: Scale) -> Iterator[Row]:
    for transport in ("shm", "tcp"):
        staging = STAGED[transport]
        names = [name for name in HANDOFFS if name in wanted and HANDOFFS[name][0] == transport]
        if not names and staging not in wanted:
            continue
        with ExitStack() as stack:
            pairs: dict[str, Pair] = {}
            for name in names or [next(name for name in HANDOFFS if HANDOFFS[name][0] == transport)]:
                side = shape(scale, *HANDOFFS[name])
                pairs[name] = stack.enter_context(pair(side, side))
            others = [each.there.pid for each in pairs.values()]
            first = next(iter(pairs.values()))
            mark, run, staged, extra = _marks(stack, transport, first)
            actions = {mark: run, staging: staged, **{name: each.hand_over for name, each in pairs.items()}}
            best = take_turns(actions, ROUNDS * scale.rounds, [*others, *extra])
            at_best = best[mark].per_second(first.bytes / 1e9)
            if staging in wanted:
                yield Row(staging, best[staging].per_second(first.bytes / 1e9), "GB/s", mark, at_best, note=STAGING)
            for name in names:
                each = pairs[name]
                yield Row(
                    name,
                    best[name].per_second(each.bytes / 1e9),
                    "GB/s",
                    mark,
                    at_best,
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


def _marks(stack: ExitStack, transport: str, of: Pair) -> tuple[str, Callable[[], None], Callable[[], None], list[int]]:
    """The mark's name, the mark, the same with staging, and the processes that take part."""
    if transport == "tcp":
        run, other = stack.enter_context(plain_socket(of.bytes))
        staged, another = stack.enter_context(plain_socket(of.bytes, staged=True))
        return "sendall and recv_into, one buffer", run, staged, [other.pid, another.pid]
    planes = of.ours.shape.layers * 2
    ours, theirs = (
        [plane * of.ours.shape.blocks + block for plane in range(planes) for block in table] for table in of.tables
    )
    source = np.random.default_rng(0).integers(0, 256, of.bytes, np.uint8)
    target = np.zeros_like(source)
    run, staged = (
        through(source, target, of.bytes // len(ours), ours, theirs) for through in (through_shared, through_staging)
    )
    return "copy into a shared segment and out", run, staged, []
