"""The speed of re-layout: gather and scatter between blocks and wire, beside a plain copy of the same bytes.

    python benchmarks/relayout.py [--json] [--save] [--layers N] [NAME …]

A name is an entry of the catalogue; by default those of `GOALS`. 2048 tokens of 8 heads x 128, 16-bit, 16 layers
(128 MiB); one thread; best of several passes in which the mark and the rows take turns, so that a busy machine slows
both.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
from rows import RESULTS, Row, machine, table, write_table

from deeplink.kvconnector.cache import Cache
from deeplink.kvconnector.catalogue import ENTRIES
from deeplink.kvconnector.convert import storage_dtype
from deeplink.kvconnector.layout import Layout
from deeplink.kvconnector.plan import Chunk

GOALS = {
    "vllm-nhd": 0.85,
    "vllm-hnd": 0.85,
    "vllm-cpu-vec": 0.5,
    "vllm-cpu-amx": 0.5,
    "vllm-ascend-310p": 0.45,
    "sglang-nhd": 0.85,
    "lmdeploy-cuda": 0.85,
    "lmdeploy-cambricon": 0.85,
    "vllm-rocm-16bit": None,
    "sglang-vectorized-5d-16bit": None,
}
HEADS, DIM, TOKENS, ADJACENT = 8, 128, 2048, 64


def bench(name: str, layers: int) -> dict[str, Callable[[], None]]:
    entry = next(entry for entry in ENTRIES if entry.name == name)
    dtype, block_size = entry.dtypes[0], entry.block_sizes[0]
    blocks = TOKENS // block_size
    bound = Layout.parse(entry.layout).bind(heads=HEADS, head_dim=DIM, block_size=block_size, blocks=blocks)
    storage = storage_dtype("bfloat16" if "bfloat16" in entry.dtypes else dtype)
    sizes = [bound.elements(tensor) for tensor in range(bound.tensors)] * layers
    cache = Cache(tuple(np.ones(size, storage) for size in sizes), bound)
    wire = np.ones(cache.wire_shape(TOKENS), storage)
    other = np.zeros_like(wire)
    # Runs of a few adjacent blocks, as an allocator that has been in use for a while hands them out.
    order = np.arange(blocks).reshape(-1, max(ADJACENT // block_size, 1))
    table = np.random.default_rng(0).permutation(order).reshape(-1).tolist()
    chunk = Chunk(0, TOKENS)
    return {
        "copy": lambda: np.copyto(other, wire),
        "gather": lambda: cache.gather(table, chunk, wire),
        "scatter": lambda: cache.scatter(wire, 0, table, chunk),
    }


def best(actions: dict[str, Callable[[], None]], passes: int) -> dict[str, float]:
    """Seconds of the fastest pass of each action."""
    seconds = dict.fromkeys(actions, float("inf"))
    for _ in range(passes):
        for name, action in actions.items():
            start = time.perf_counter()
            action()
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(GOALS))
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--passes", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/relayout.json and README.md's table"
    )
    arguments = parser.parse_args()
    before = machine()
    rows = []
    gigabytes = arguments.layers * 2 * HEADS * TOKENS * DIM * 2 / 1e9
    for name in arguments.names:
        seconds = best(bench(name, arguments.layers), arguments.passes)
        for way in ("gather", "scatter"):
            value, mark = gigabytes / seconds[way], gigabytes / seconds["copy"]
            goal = GOALS.get(name)
            row = Row(f"relayout_{way}_{name}", value, "GB/s", "numpy copyto", mark, goal, "at least")
            rows.append(row.as_json())
    result = {"machine": before, "rows": rows}
    if arguments.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "relayout.json").write_text(json.dumps(result, indent=2) + "\n")
        write_table("relayout", result)
    print(json.dumps(result) if arguments.json else table(rows))


if __name__ == "__main__":
    main()
