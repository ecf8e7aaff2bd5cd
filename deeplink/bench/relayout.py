"""Re-layout and digest of one rank's cache by one thread, beside a plain copy of the same bytes.

`gather` is blocks to wire, `scatter` wire to blocks. The cache has runs of 64 adjacent tokens, as an allocator that has
been in use for a while hands them out; most differ in one thing from the wire, which is ``[layer, kv, head, token,
dim]``. The mark is torch's copy_ from a contiguous tensor in memory such as the cache's to one in staging, by one
thread, or numpy's copyto where torch is absent.

`cpu_vec` and `cpu_amx` are vLLM's two packings on CPUs, written by vLLM's own operation; the second is packed here, as
that operation does it, on a CPU where it cannot run, and the row says so. What is gathered from these is compared with
what was written before anything is timed. `digest_…` of these is taken of the blocks themselves.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from deeplink.bench import packings
from deeplink.bench.memory import BF16, Elements, filled, memory
from deeplink.bench.rows import Row, Skipped
from deeplink.bench.scale import Scale
from deeplink.bench.timing import take_turns
from deeplink.kvconnector.caches.cache import Cache
from deeplink.kvconnector.layouts.layout import Layout
from deeplink.kvconnector.relayout import compiled, digest, in_blocks
from deeplink.kvconnector.relayout.convert import storage_dtype
from deeplink.kvconnector.relayout.plan import Chunk, runs
from deeplink.kvconnector.transport.staging import Staging

LAYERS, HEADS, DIM, ADJACENT = 16, 8, 128, 64
ROUNDS = 5
"""For each that the scale asks for: a pass takes milliseconds."""


@dataclass(frozen=True)
class Case:
    """`ways` are what is timed: gather, scatter, digest. Of `of_heads` in the cache, `heads` take part."""

    layout: str
    block: int
    goal: float | None
    ways: tuple[str, ...] = ("gather", "scatter")
    of_heads: int = HEADS
    written: str = ""
    """The packing that the engine writes; else the cache is random bytes."""
    dtype: str = "bfloat16"
    heads: int = HEADS
    dim: int = DIM
    note: str = ""


VEC = "block head (k: dim token | v: token dim)"
AMX = "block head (k: token/16 dim/2 token%16 dim%2 | v: dim/16 token/2 dim%16 token%2)"
HALF_PAGES = "every other 2 KiB, nothing moved within: the memory's share of relayout_head_slice_nhd"
CASES = {
    "relayout_reblock_16": Case("kv block head token dim", 16, 0.85),
    "relayout_reblock_128": Case("kv block head token dim", 128, 0.85),
    "relayout_nhd": Case("kv block token head dim", 16, 0.85),
    "relayout_kv_interleaved": Case("block head token (kv dim)", 16, 0.85),
    "relayout_kv_order": Case("block kv head token dim", 16, 0.85),
    "relayout_head_slice": Case("kv block head token dim", 16, 0.85, of_heads=2 * HEADS),
    "relayout_head_slice_nhd": Case("kv block token head dim", 16, 0.85, of_heads=2 * HEADS),
    "relayout_half_pages": Case(
        "kv block token head dim", 16, None, of_heads=2, heads=1, dim=HEADS * DIM, note=HALF_PAGES
    ),
    "relayout_nz": Case("kv block (head dim)/16 token (head dim)%16", 128, 0.45),
    "relayout_cpu_vec": Case(VEC, 128, 0.5, written="vec"),
    "relayout_cpu_amx": Case(AMX, 128, 0.5, written="amx"),
    "digest_cpu_vec": Case(VEC, 128, 0.5, ("digest",), written="vec"),
    "digest_cpu_amx": Case(AMX, 128, 0.5, ("digest",), written="amx"),
}
PLAIN_DIGEST, PLAIN_GOAL = "digest", 0.45
ROWS = (
    PLAIN_DIGEST,
    *(name if way == "digest" else f"{name}_{way}" for name, case in CASES.items() for way in case.ways),
)


def measure(wanted: Collection[str], scale: Scale) -> Iterator[Row | Skipped]:
    if PLAIN_DIGEST in wanted:
        yield from plain_digest(scale)
    for name, case in CASES.items():
        yield from measure_case(name, case, wanted, scale)


def measure_case(
    name: str, case: Case, wanted: Collection[str] | None, scale: Scale, *, anyhow: bool = False
) -> Iterator[Row | Skipped]:
    """The rows of one case that are wanted; None for all. With `anyhow`, what the engine should have written and cannot
    here is random bytes, and the row says so."""
    names = {way: name if way == "digest" else f"{name}_{way}" for way in case.ways}
    rows = {way: row for way, row in names.items() if wanted is None or row in wanted}
    if not rows:
        return
    try:
        cache, table, note = prepared(case, scale.tokens)
    except packings.Unavailable as exc:
        if not anyhow:
            yield from (Skipped(row, str(exc)) for row in rows.values())
            return
        cache, table, _ = prepared(replace(case, written=""), scale.tokens)
        note = f"random bytes: {exc}"
    mark, copy = marked()
    actions = timed(cache, table, scale.tokens, copy)
    size = cache.token_bytes * scale.tokens
    best = take_turns({way: actions[way] for way in ("copy", *case.ways)}, ROUNDS * scale.rounds)
    for way, row in rows.items():
        yield Row(
            row,
            best[way].per_second(size / 1e9),
            "GB/s",
            mark,
            best["copy"].per_second(size / 1e9),
            case.goal,
            "at least",
            cpu_s_per_gb=best[way].cpu / size * 1e9,
            mark_cpu_s_per_gb=best["copy"].cpu / size * 1e9,
            note="; ".join(filter(None, ["numba" if compiled.wanted() else "numpy", note, case.note])),
        )


def timed(
    cache: Cache, table: list[int], tokens: int, copy: Callable[[Any, Any], None]
) -> dict[str, Callable[[], object]]:
    """What can be timed of a cache: a plain copy, and every way, each of the whole of it."""
    shape = cache.wire_shape(tokens)
    plain, wire = memory(shape, cache.dtype), staged(shape, cache.dtype)
    chunk = Chunk(0, tokens)

    def digested() -> None:
        in_blocks.tiles(cache.layers, cache.bound, runs(table, cache.bound.block_size, chunk), chunk)

    return {
        "copy": lambda: copy(wire, plain),
        "gather": lambda: cache.gather(table, chunk, wire),
        "scatter": lambda: cache.scatter(wire, 0, table, chunk),
        "digest": digested,
    }


def staged(shape: tuple[int, ...], dtype: np.dtype[Any] = BF16) -> Elements:
    """As kvconnector has it."""
    array = np.frombuffer(Staging(math.prod(shape) * dtype.itemsize).memory, dtype).reshape(shape)
    array[...] = 1
    return array


def table_of(blocks: int, block: int, seed: int = 0) -> list[int]:
    """Runs of a few adjacent blocks, each run somewhere else."""
    runs = np.arange(blocks).reshape(-1, min(max(ADJACENT // block, 1), blocks))
    return [int(number) for number in np.random.default_rng(seed).permutation(runs).reshape(-1)]


def prepared(case: Case, tokens: int) -> tuple[Cache, list[int], str]:
    """The part of the cache that takes part, the blocks of its tokens, and who wrote it. Raises
    packings.Unavailable."""
    blocks = tokens // case.block
    bound = Layout.parse(case.layout).bind(heads=case.of_heads, head_dim=case.dim, block_size=case.block, blocks=blocks)
    table = table_of(blocks, case.block)
    sizes = [bound.elements(tensor) for tensor in range(bound.tensors)] * LAYERS
    if not case.written:
        rng = np.random.default_rng(0)
        layers = tuple(filled(memory((size,), storage_dtype(case.dtype)), rng) for size in sizes)
        return Cache(layers, bound).part(range(LAYERS), (0, case.heads)), table, ""
    written = _written(case.written, blocks, case.block, tuple(table), case.dtype)
    cache = Cache(tuple(written.layers), bound)
    wire = np.empty(cache.wire_shape(tokens), cache.dtype)
    cache.gather(table, Chunk(0, tokens), wire)
    if not np.array_equal(wire, written.wire):
        raise ValueError(f"what is gathered from the {case.written} packing is not what was written")
    return cache, table, written.by


@functools.lru_cache(maxsize=1)
def _written(packing: str, blocks: int, block: int, table: tuple[int, ...], dtype: str) -> packings.Filled:
    return packings.filled(packing, packings.Size(LAYERS, HEADS, DIM, blocks, block, dtype), table)


def marked() -> tuple[str, Callable[[Any, Any], None]]:
    """The plain copy, of numpy arrays, and its name."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return "numpy copyto", np.copyto
    torch.set_num_threads(1)

    def copy(target: npt.NDArray[Any], source: npt.NDArray[Any]) -> None:
        signed = f"i{target.itemsize}"
        torch.from_numpy(target.view(signed)).copy_(torch.from_numpy(source.view(signed)))

    return "torch copy_", copy


def plain_digest(scale: Scale) -> Iterator[Row]:
    """Of a chunk that lies in staging in wire form, as the consumer takes it."""
    mark, copy = marked()
    shape = (LAYERS, 2, HEADS, scale.tokens, DIM)
    plain, wire = memory(shape), filled(staged(shape), np.random.default_rng(0))
    actions = {
        "copy": lambda: copy(wire, plain),
        "digest": lambda: digest.tiles(Chunk(0, scale.tokens), wire),
    }
    best = take_turns(actions, ROUNDS * scale.rounds)
    size = wire.nbytes / 1e9
    values = best["digest"].per_second(size), best["copy"].per_second(size)
    cost = best["digest"].cpu / size
    yield Row(PLAIN_DIGEST, values[0], "GB/s", mark, values[1], PLAIN_GOAL, "at least", cpu_s_per_gb=cost)
