"""The speed of re-layout and digests on one thread, beside `torch.Tensor.copy_` of the same bytes.

    python benchmarks/relayout.py [--json] [--save] [--layers N] [--by numpy|numba] [NAME …]

A name is one of `CASES`; by default all. 2048 tokens of 8 heads x 128, 16 layers (128 MiB at 16 bits), in a block table
with runs of 64 tokens. The best of three rounds of several passes each, in which the mark and the rows take turns, so
that a busy machine slows both. Without torch the mark is numpy's copyto, which is as fast. Where vLLM's CPU kernels are
at hand too, the caches in its CPU packings are written by them, and what is gathered has to be what they were given.
"""

from __future__ import annotations

import argparse
import json
import math
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
from rows import RESULTS, Row, machine, table, write_table

from deeplink.kvconnector import compiled, convert, digest, in_blocks
from deeplink.kvconnector.catalogue import LAYOUTS
from deeplink.kvconnector.layout import Bound, Layout
from deeplink.kvconnector.plan import Chunk, runs

HEADS, DIM, TOKENS, ADJACENT, ROUNDS = 8, 128, 2048, 64, 3
CHUNK = Chunk(0, TOKENS)


@dataclass(frozen=True)
class Case:
    """A layout of the catalogue. `written` is what vLLM's kernel calls it. With `of_heads`, the cache has so many
    heads, and HEADS of them are moved."""

    layout: str
    block_size: int
    goal: float | None
    dtype: str = "bfloat16"
    written: str = ""
    of_heads: int = HEADS


CASES = {
    "cpu_vec": Case("vllm-cpu-vec", 128, 0.5, written="vec"),
    "cpu_vec_fp16": Case("vllm-cpu-vec", 128, 0.5, "float16", written="vec"),
    "cpu_vec_fp32": Case("vllm-cpu-vec", 128, 0.5, "float32", written="vec"),
    "cpu_amx": Case("vllm-cpu-amx", 128, 0.5, written="amx"),
    "nhd": Case("vllm-nhd", 16, 0.85),
    "nhd_reblock": Case("vllm-nhd", 128, 0.85),
    "hnd": Case("vllm-hnd", 16, 0.85),
    "kv_in_block": Case("vllm-kv-in-block", 16, 0.85),
    "kv_first": Case("lmdeploy-cuda", 64, 0.85),
    "head_slice": Case("vllm-nhd", 16, 0.85, of_heads=2 * HEADS),
    "separate_slots": Case("sglang-nhd", 1, 0.85),
    "separate_hnd": Case("lmdeploy-cambricon", 64, 0.85),
    "nz": Case("vllm-ascend-310p", 128, 0.45),
    "rocm": Case("vllm-rocm-16bit", 16, None),
    "vectorized_5d": Case("sglang-vectorized-5d-16bit", 16, None),
}
DIGESTED = ("cpu_vec", "cpu_amx")
DENSE_GOAL = 0.45


def memory(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """As staging gets it, with something in every page."""
    array = np.frombuffer(mmap.mmap(-1, math.prod(shape) * dtype.itemsize), dtype).reshape(shape)
    array[...] = np.arange(shape[-1], dtype=dtype)
    return array


def bind(case: Case) -> Bound:
    layout = Layout.parse(LAYOUTS[case.layout])
    # A rank that has more heads than are wanted: the same layout with wider strides.
    strides = {"token": case.of_heads * 2 * DIM} if case.of_heads > HEADS else None
    blocks = TOKENS // case.block_size
    return layout.bind(heads=HEADS, head_dim=DIM, block_size=case.block_size, blocks=blocks, strides=strides)


def caches(case: Case, bound: Bound, layers: int, slots: list[int]) -> tuple[list[np.ndarray], np.ndarray | None]:
    """The cache, and what vLLM's kernel wrote there, in wire form; None where it was not at hand."""
    storage = convert.storage_dtype(case.dtype)
    made = [memory((bound.elements(tensor),), storage) for _ in range(layers) for tensor in range(bound.tensors)]
    if not case.written or find_spec("vllm") is None:
        return made, None
    import torch
    import vllm._custom_ops  # noqa: F401

    content = np.random.default_rng(0).integers(0, 1 << 8 * storage.itemsize, (2, HEADS, TOKENS, DIM), storage)
    dtype, signed = getattr(torch, case.dtype), f"i{storage.itemsize}"
    k, v = (torch.from_numpy(side.view(signed).transpose(1, 0, 2).copy()).view(dtype) for side in content)
    for cache in made:
        blocks = torch.from_numpy(cache.view(signed)).view(dtype).view(bound.blocks, HEADS, 2 * case.block_size, DIM)
        sides = blocks.chunk(2, dim=2)
        torch.ops._C.cpu_attn_reshape_and_cache(k, v, *sides, torch.tensor(slots), case.written, 1.0, 1.0, "auto")
    return made, content


Actions = dict[str, Callable[[], object]]


def marks(size: int) -> Actions:
    """Copies of `size` bytes from one contiguous array to another."""
    source, target = (memory((size // 2,), np.dtype(np.int16)) for _ in range(2))
    actions: Actions = {"numpy copyto": lambda: np.copyto(target, source)}
    if find_spec("torch") is not None:
        import torch

        torch.set_num_threads(1)
        to, start = torch.from_numpy(target), torch.from_numpy(source)
        actions["torch copy_"] = lambda: to.copy_(start)
    return actions


def actions(name: str, layers: int, by: compiled.By | None) -> tuple[Actions, int, str]:
    """What to time, the bytes that each moves, and who wrote the cache."""
    case = CASES[name]
    bound = bind(case)
    blocks = np.arange(bound.blocks).reshape(-1, max(ADJACENT // case.block_size, 1))
    table = np.random.default_rng(0).permutation(blocks).reshape(-1).tolist()
    slots = [table[token // case.block_size] * case.block_size + token % case.block_size for token in range(TOKENS)]
    cache, content = caches(case, bound, layers, slots)
    wire = memory(convert.wire_shape(bound, layers, TOKENS), cache[0].dtype)

    def where() -> Any:
        return runs(table, case.block_size, CHUNK)

    made: Actions = {
        f"relayout_{name}_gather": lambda: convert.gather(cache, bound, where(), wire, by),
        f"relayout_{name}_scatter": lambda: convert.scatter(wire, bound, where(), cache, by),
    }
    if name in DIGESTED:
        made[f"digest_{name}"] = lambda: in_blocks.tiles(cache, bound, where(), CHUNK, by=by)
    if name == "cpu_vec":
        made["digest"] = lambda: digest.tiles(CHUNK, wire, by=by)
    for action in made.values():  # compile, if need be
        action()
    convert.gather(cache, bound, where(), wire, by)
    if content is not None:
        assert all((layer == content).all() for layer in wire), "the cache is not what the engine's kernel was given"
    return made, wire.nbytes, "" if content is None else "the engine's kernel"


def best(actions: Actions, passes: int) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of the fastest pass of each action, and the least processor time of one."""
    seconds, busy = (dict.fromkeys(actions, float("inf")) for _ in range(2))
    for _ in range(ROUNDS * passes):
        for name, action in actions.items():
            start, cpu = time.perf_counter(), time.process_time()
            action()
            seconds[name] = min(seconds[name], time.perf_counter() - start)
            busy[name] = min(busy[name], time.process_time() - cpu)
    return seconds, busy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(CASES), metavar="NAME")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--passes", type=int, default=4, help="in each of three rounds")
    parser.add_argument("--by", choices=["numpy", "numba"], help="insist on these loops")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/relayout.json and README.md's table"
    )
    arguments = parser.parse_args()
    before = machine() | {"loops": "numba" if compiled.wanted(arguments.by) else "numpy"}
    compile_seconds = compiled.warm(arguments.by)
    rows, written = [], set()
    for name in arguments.names:
        timed, size, by_engine = actions(name, arguments.layers, arguments.by)
        written |= {name} if by_engine else set()
        copies = marks(size)
        seconds, busy = best({**copies, **timed}, arguments.passes)
        mark_name = "torch copy_" if "torch copy_" in copies else "numpy copyto"
        mark = size / 1e9 / seconds[mark_name]
        if name == arguments.names[0]:
            for copy in copies:
                value, cpu = size / 1e9 / seconds[copy], busy[copy] / (size / 1e9)
                row_name = "copy_" + copy.split()[0]
                rows.append(Row(row_name, value, "GB/s", mark_name, mark, cpu_s_per_gb=cpu))
        for row in timed:
            goal = DENSE_GOAL if row == "digest" else CASES[name].goal
            value, cpu = size / 1e9 / seconds[row], busy[row] / (size / 1e9)
            rows.append(Row(row, value, "GB/s", mark_name, mark, goal, "at least", cpu_s_per_gb=cpu))
    shown = [row.as_json() for row in rows]
    notes = {"warm_seconds": round(compile_seconds, 2), "written_by_the_engine": ", ".join(sorted(written)) or "none"}
    result = {"machine": before | notes, "rows": shown}
    if arguments.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "relayout.json").write_text(json.dumps(result, indent=2) + "\n")
        write_table("relayout", result)
    print(json.dumps(result) if arguments.json else table(shown))


if __name__ == "__main__":
    # One thread: what a handoff has, beside an engine that computes.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
