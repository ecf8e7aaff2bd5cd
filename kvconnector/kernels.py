"""Gather and scatter by compiled loops: one call for all layers, runs and moves, without the interpreter's lock.

Needs numba. Everything that comes here was checked by `deeplink.kvconnector.convert`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deeplink.kvconnector import vectors as v
from deeplink.kvconnector.jit import part, whole
from deeplink.kvconnector.jobs import (
    AHEAD,
    COLUMNS,
    IN_BLOCKS,
    KIND,
    ON_WIRE,
    PER_BLOCK,
    ROWS,
    SOON,
    STREAM,
    TENSOR,
    jobs,
)
from deeplink.kvconnector.layout import Bound
from deeplink.kvconnector.loops import walk
from deeplink.kvconnector.moves import Into
from deeplink.kvconnector.plan import Run

Elements = npt.NDArray[Any]
Table = npt.NDArray[np.int64]


@part
def copy_layer(
    table: Any,
    groups: Any,
    runs: Any,
    first_run: int,
    last_run: int,
    caches: Any,
    first_cache: int,
    wire: int,
    token_bytes: int,
    into_wire: bool,
    stream: bool,
) -> None:
    """Runs [first_run, last_run) of one layer. `runs` are (block, count, at, group); the jobs of a group are `groups`
    (first, after the last) of the table."""
    for r in range(first_run, last_run):
        block, count, at, group = runs[r]
        for j in range(groups[group, 0], groups[group, 1]):
            job = table[j]
            in_blocks = caches[first_cache + job[TENSOR]] + job[IN_BLOCKS] + block * job[PER_BLOCK]
            on_wire = wire + job[ON_WIRE] + at * token_bytes
            to, start = (on_wire, in_blocks) if into_wire else (in_blocks, on_wire)
            ahead = job[AHEAD]
            if into_wire and job[KIND] == ROWS and r + 2 < last_run and count * job[PER_BLOCK] <= SOON:
                # What follows a short run in memory is not what follows it.
                ahead = (runs[r + 2, 0] - block) * job[PER_BLOCK]
            walk(job, to, start, count, ahead, stream and job[STREAM] != 0)


@whole
def copy_layers(
    table: Any,
    groups: Any,
    runs: Any,
    caches: Any,
    wire: int,
    layers: int,
    layer_bytes: int,
    token_bytes: int,
    into_wire: bool,
    stream: bool,
) -> None:
    tensors = caches.size // layers
    for layer in range(layers):
        copy_layer(
            table,
            groups,
            runs,
            0,
            runs.shape[0],
            caches,
            layer * tensors,
            wire + layer * layer_bytes,
            token_bytes,
            into_wire,
            stream,
        )
    if stream:
        v.fence()


STREAMED = 1 << 20
"""Bytes of a target that is better not kept in the caches."""


def copy(caches: Sequence[Elements], bound: Bound, runs: list[Run], wire_LSHTD: Elements, into: Into) -> None:
    """All of a gather or scatter. Everything must have been checked."""
    if not runs or not caches:
        return
    layers, _, _, tokens, dim = wire_LSHTD.shape
    itemsize = wire_LSHTD.itemsize
    table, groups, places = plan(bound, itemsize, tokens, runs, into)
    bases = np.array([address(cache) for cache in caches], np.int64)
    wire = address(wire_LSHTD)
    aligned = wire % v.LINE == 0 if into == "wire" else not (bases % v.LINE).any()
    copy_layers(
        table,
        groups,
        places,
        bases,
        wire,
        layers,
        wire_LSHTD[0].nbytes,
        dim * itemsize,
        into == "wire",
        aligned and wire_LSHTD.nbytes >= STREAMED,
    )


def warm() -> None:
    """Compile, by copying nothing."""
    nothing = np.zeros((0, COLUMNS), np.int64), np.zeros((0, 2), np.int64), np.zeros((0, 4), np.int64)
    copy_layers(*nothing, np.zeros(1, np.int64), 0, 1, 0, 0, True, False)


def plan(bound: Bound, itemsize: int, tokens: int, runs: list[Run], into: Into) -> tuple[Table, Table, Table]:
    """The table, the rows of it that each group of runs needs, and the runs."""
    shapes: dict[tuple[int, int], int] = {}
    places = np.array(
        [(run.block, run.count, run.at, shapes.setdefault((run.first, run.tokens), len(shapes))) for run in runs],
        np.int64,
    )
    tables = [jobs(bound, itemsize, tokens, first, held, into) for first, held in shapes]
    ends = np.cumsum([0, *map(len, tables)])
    return np.concatenate(tables), np.stack([ends[:-1], ends[1:]], axis=1).astype(np.int64), places


def address(array: Elements) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
