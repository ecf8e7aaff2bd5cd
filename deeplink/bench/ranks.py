"""Unequal tensor parallelism over tcp, beside equal.

A cache of 8 heads on one rank goes to two ranks with 4 heads each, and the other way round. All ranks of an engine are
in one process, and all take their part at the same time. The mark is the better of one rank to one and two to two.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import replace

from deeplink.bench import loopback
from deeplink.bench.handoff import pair
from deeplink.bench.rows import Row
from deeplink.bench.scale import Scale
from deeplink.bench.timing import take_turns

GOAL = 0.9
SIZES = {"tp_1_2": (1, 2), "tp_2_1": (2, 1), "1 to 1": (1, 1), "2 to 2": (2, 2)}
ROWS = ("tp_1_2", "tp_2_1")


def measure(wanted: Collection[str], scale: Scale) -> Iterator[Row]:
    names = [name for name in SIZES if name in wanted or name not in ROWS]
    with ExitStack() as stack:
        base = loopback.shape(scale, "tcp", digest=True)
        pairs = {}
        for name in names:
            ours, theirs = (replace(base, tp=size) for size in SIZES[name])
            pairs[name] = stack.enter_context(pair(ours, theirs))
        others = [each.there.pid for each in pairs.values()]
        best = take_turns(
            {name: each.hand_over for name, each in pairs.items()}, loopback.ROUNDS * scale.rounds, others
        )
        gigabytes = base.bytes / 1e9
        equal = min(("1 to 1", "2 to 2"), key=lambda name: best[name].seconds)
        for name in names:
            if name in ROWS:
                yield Row(
                    name,
                    best[name].per_second(gigabytes),
                    "GB/s",
                    f"equal: {equal}",
                    best[equal].per_second(gigabytes),
                    GOAL,
                    "at least",
                    cpu_s_per_gb=best[name].cpu / gigabytes,
                    mark_cpu_s_per_gb=best[equal].cpu / gigabytes,
                    breakdown=pairs[name].breakdown(),
                    note=loopback.bound(best[name].cpu / gigabytes),
                )
