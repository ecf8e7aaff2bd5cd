"""The speed of casts between element types, beside a plain copy that reads and writes as many bytes.

    python benchmarks/cast.py [--json] [--save] [CAST …]

16 M elements of N(0, 1) (8 layers, K and V, 8 heads, 1024 tokens, 128 dims), checked for range and cast in one thread;
best of several passes in which the mark and the casts take turns, so that a busy machine slows both. A cast's speed is
half of what it reads and writes, which for a copy is what it copies.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
from rows import RESULTS, Row, machine, table, write_table

from deeplink.kvconnector.layouts.cast import Cast, between
from deeplink.kvconnector.layouts.elements import FORMATS, INTEGER
from deeplink.kvconnector.relayout.casting import apply
from deeplink.kvconnector.relayout.codes import encode
from deeplink.kvconnector.relayout.convert import storage_dtype
from deeplink.kvconnector.relayout.quantize import dequantize, quantize

SHAPE = (8, 2, 8, 1024, 128)
GOALS = {
    "bfloat16->float32": 0.5,
    "float16->float32": None,
    "float8_e4m3fn->bfloat16": None,
    "float8_e4m3fn->float32": None,
    "float8_e4m3fn->float8_e4m3fnuz": None,
    "int8->bfloat16": None,
    "bfloat16->float16": None,
    "float16->bfloat16": None,
    "float32->bfloat16": None,
    "float32->float16": None,
    "bfloat16->float8_e4m3fn": None,
    "float32->float8_e4m3fn": None,
    "bfloat16->int8": None,
}
"""The first six are exact, or as exact as their scales."""


def bench(cast: Cast) -> tuple[float, Callable[[], None], Callable[[], None]]:
    """Gigabytes, the cast, and its mark."""
    source = _values(cast.source)
    target = np.zeros(SHAPE, storage_dtype(cast.target))
    scales = np.full((*SHAPE[:4], 1), 0.03, np.float32)
    size = (source.nbytes + target.nbytes) // 2
    ours, theirs = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    run: Callable[[], None]
    if cast.target == INTEGER:
        run = lambda: quantize(cast, source, target, scales)  # noqa: E731
    elif cast.source == INTEGER:
        run = lambda: dequantize(cast, source, scales, target)  # noqa: E731
    else:
        run = lambda: apply(cast, source, target)  # noqa: E731
    return size / 1e9, run, lambda: np.copyto(theirs, ours)


def _values(element: str) -> np.ndarray:
    values = np.random.default_rng(0).standard_normal(SHAPE, np.float32)
    if element == INTEGER:
        return np.rint(values * 30).clip(-127, 127).astype(np.int8).view(np.uint8)
    if element == "float32":
        return values.view(np.uint32)
    out = np.empty(SHAPE, storage_dtype(element))
    for layer, row in zip(out, values, strict=True):
        layer[...] = encode(row.astype(np.float64), FORMATS[element])
    return out


def best(actions: tuple[Callable[[], None], ...], passes: int) -> list[float]:
    """Seconds of the fastest pass of each action."""
    seconds = [float("inf")] * len(actions)
    for _ in range(passes):
        for index, action in enumerate(actions):
            start = time.perf_counter()
            action()
            seconds[index] = min(seconds[index], time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("casts", nargs="*", default=list(GOALS))
    parser.add_argument("--passes", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/cast.json and README.md's table")
    arguments = parser.parse_args()
    before = machine()
    rows = []
    for name in arguments.casts:
        cast = between(*name.split("->"))
        if cast is None:
            parser.error(f"there is no cast {name}")
        gigabytes, run, copy = bench(cast)
        value, mark = (gigabytes / seconds for seconds in best((run, copy), arguments.passes))
        rows.append(Row(f"cast_{name}", value, "GB/s", "numpy copyto", mark, GOALS.get(name), "at least").as_json())
    result = {"machine": before, "rows": rows}
    if arguments.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "cast.json").write_text(json.dumps(result, indent=2) + "\n")
        write_table("cast", result)
    print(json.dumps(result) if arguments.json else table(rows))


if __name__ == "__main__":
    main()
