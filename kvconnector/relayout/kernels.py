"""Gather and scatter by compiled loops: one call for all layers, runs and moves, without the interpreter's lock.

Needs numba. Everything that comes here was checked by `deeplink.kvconnector.relayout.convert`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deeplink.errors import LayoutError
from deeplink.kvconnector.layouts.layout import Bound
from deeplink.kvconnector.relayout import vectors as v
from deeplink.kvconnector.relayout.convert import Blocks, address
from deeplink.kvconnector.relayout.jit import part, whole
from deeplink.kvconnector.relayout.jobs import (
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
from deeplink.kvconnector.relayout.loops import in_stretches, stretches, walk
from deeplink.kvconnector.relayout.moves import Into
from deeplink.kvconnector.relayout.plan import Chunk, Run

Elements = npt.NDArray[Any]
Table = npt.NDArray[np.int64]


NEAR = 24 * v.LINE
"""Bytes to have under way out of the wire where a run is long. Where many are short, what is asked for is what the same
place of a later head will want."""


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
            ahead, follows = job[AHEAD], 0
            if job[KIND] == ROWS and not into_wire:
                if r + 1 < last_run and (runs[r + 1, 2] - at) * token_bytes > SOON:
                    ahead = NEAR
            elif job[KIND] == ROWS:
                # What follows a run in memory is not what follows it.
                if count * job[PER_BLOCK] <= SOON:
                    if r + 2 < last_run:
                        ahead = (runs[r + 2, 0] - block) * job[PER_BLOCK]
                elif j + 1 < groups[group, 1]:
                    after = table[j + 1]
                    follows = caches[first_cache + after[TENSOR]] + after[IN_BLOCKS] + block * after[PER_BLOCK]
                elif r + 1 < last_run:
                    after = table[groups[runs[r + 1, 3], 0]]
                    follows = caches[first_cache + after[TENSOR]] + after[IN_BLOCKS] + runs[r + 1, 0] * after[PER_BLOCK]
            if follows and in_stretches(job, count, ahead):
                stretches(job, to, start, count, ahead, follows, stream and job[STREAM] != 0)
            else:
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
    """All layers of a chunk, one after the other. `caches` has the address of each tensor, those of a layer together;
    `wire` is where the first layer begins, and the next is `layer_bytes` on."""
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


KNOWN = 64
"""Kinds of chunks that are remembered of one cache: a handoff has one kind, and a first and a last chunk."""
AT = 3
"""Column of the parts of a chunk that has where they begin on the wire."""


@whole
def find_runs(numbers: Any, parts: Any, blocks: int, runs: Any) -> int:
    """Runs of adjacent blocks, as `copy_layer` wants them, of which `parts` says what is where; how many they are, or
    -1 less the place of a number that is not one of the cache's `blocks`."""
    found = 0
    for part_ in range(parts.shape[0]):
        first, last, tokens, at = parts[part_]
        for place in range(first, last):
            block = numbers[place]
            if block < 0 or block >= blocks:
                return -1 - place
            if place > first and numbers[place - 1] + 1 == block:
                runs[found - 1, 1] += 1
            else:
                runs[found, 0], runs[found, 1] = block, 1
                runs[found, 2], runs[found, 3] = at + (place - first) * tokens, part_
                found += 1
    return found


STREAMED = 1 << 20
"""Bytes of a target that is better not kept in the caches."""


def copy(blocks: Blocks, runs: list[Run], wire_LSHTD: Elements, into: Into) -> None:
    """All of a gather or scatter. Everything must have been checked."""
    if runs and blocks.layers:
        table, groups, places = plan(blocks.bound, wire_LSHTD.itemsize, wire_LSHTD.shape[3], runs, into)
        _copy(blocks, table, groups, places, wire_LSHTD, into)


def copy_chunk(
    blocks: Blocks, table: Sequence[int], chunk: Chunk, origin: int, wire_LSHTD: Elements, into: Into
) -> None:
    """The same of the tokens of a chunk, in the blocks that `table` has for them. What is in the blocks and on the wire
    must have been checked; raises LayoutError for tokens that are not in the table, the wire or the cache."""
    size, held = blocks.bound.block_size, wire_LSHTD.shape[3]
    if chunk.stop > len(table) * size:
        raise LayoutError(f"tokens [{chunk.start}, {chunk.stop}) in {len(table)} blocks of {size}")
    if chunk.start < origin or chunk.stop - origin > held:
        raise LayoutError(f"tokens [{chunk.start}, {chunk.stop}) of a wire chunk of [{origin}, {origin + held})")
    if chunk.start >= chunk.stop or not blocks.layers:
        return
    first, last = chunk.start // size, -(-chunk.stop // size)
    numbers = np.asarray(table[first:last], np.int64)
    shapes, places = _parts(first * size, chunk, size)
    places[:, AT] += chunk.start - origin
    runs = np.empty((last - first, 4), np.int64)
    found = find_runs(numbers, places, blocks.bound.blocks, runs)
    if found < 0:
        raise LayoutError(f"block {numbers[-1 - found]} of a cache that has {blocks.bound.blocks}")
    kind = held, shapes, into
    if (tables := blocks.known.get(kind)) is None:
        if len(blocks.known) >= KNOWN:
            blocks.known.clear()
        tables = blocks.known[kind] = _tables(blocks.bound, wire_LSHTD.itemsize, held, shapes, into)
    jobs_table, groups = tables
    _copy(blocks, jobs_table, groups, runs[:found], wire_LSHTD, into)


def _copy(blocks: Blocks, table: Table, groups: Table, runs: Table, wire_LSHTD: Elements, into: Into) -> None:
    itemsize, dim = wire_LSHTD.itemsize, wire_LSHTD.shape[4]
    wire = address(wire_LSHTD)
    aligned = wire % v.LINE == 0 if into == "wire" else not np.bitwise_or.reduce(blocks.addresses) % v.LINE
    copy_layers(
        table,
        groups,
        runs,
        blocks.addresses,
        wire,
        blocks.layers,
        wire_LSHTD.nbytes // blocks.layers,
        dim * itemsize,
        into == "wire",
        aligned and wire_LSHTD.nbytes >= STREAMED,
    )


def warm() -> None:
    """Compile, by copying nothing."""
    nothing = np.zeros((0, COLUMNS), np.int64), np.zeros((0, 2), np.int64), np.zeros((0, 4), np.int64)
    copy_layers(*nothing, np.zeros(1, np.int64), 0, 1, 0, 0, True, False)
    find_runs(np.zeros(0, np.int64), nothing[2], 0, nothing[2])


Shapes = tuple[tuple[int, int], ...]
"""Of runs: the first token of each block, and how many."""


def plan(bound: Bound, itemsize: int, tokens: int, runs: list[Run], into: Into) -> tuple[Table, Table, Table]:
    """The table, the rows of it that each group of runs needs, and the runs."""
    shapes: dict[tuple[int, int], int] = {}
    places = np.array(
        [(run.block, run.count, run.at, shapes.setdefault((run.first, run.tokens), len(shapes))) for run in runs],
        np.int64,
    )
    return *_tables(bound, itemsize, tokens, tuple(shapes), into), places


def _tables(bound: Bound, itemsize: int, tokens: int, shapes: Shapes, into: Into) -> tuple[Table, Table]:
    """The jobs of runs of each of these shapes, and which of them are whose. Read-only."""
    tables = [jobs(bound, itemsize, tokens, first, held, into) for first, held in shapes]
    ends = np.cumsum([0, *map(len, tables)])
    found = np.concatenate(tables), np.stack([ends[:-1], ends[1:]], axis=1).astype(np.int64)
    for table in found:
        table.flags.writeable = False
    return found


def _parts(base: int, chunk: Chunk, size: int) -> tuple[Shapes, Table]:
    """The shapes of a chunk's blocks (the first and the last may be partial), and for each (first block after that of
    token `base`, after the last, tokens, the first one's place in the chunk)."""
    shapes, places = [], []
    at = chunk.start
    while at < chunk.stop:
        block, first = divmod(at - base, size)
        whole = 0 if first else (chunk.stop - at) // size
        tokens = size if whole else min(size - first, chunk.stop - at)
        shapes.append((first, tokens))
        places.append((block, block + max(whole, 1), tokens, at - chunk.start))
        at += max(whole, 1) * tokens
    return tuple(shapes), np.array(places, np.int64)
