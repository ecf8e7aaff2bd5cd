"""The speed of re-layout and digests on one thread, beside `torch.Tensor.copy_` of the same bytes: more layouts.

    python benchmarks/relayout.py [--json] [--save] [--tokens N] [--rounds N] [--by numpy|numba] [NAME …]

`deeplink bench kv` has a row for each thing in which a cache differs from the wire; these are the layouts that engines
have, by the catalogue, measured by the same code (`deeplink.bench.relayout`), and other element types. A name is one of
`CASES`; by default all. Without torch the mark is numpy's copyto, which is as fast. Where vLLM's CPU kernels are at
hand (the Python of an engine's environment), the caches in its CPU packings are written by them, and what is gathered
has to be what they were given; elsewhere they are random bytes, and the row says so.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator

import numpy as np
from rows import RESULTS, Row, machine, table, write_table

from deeplink.bench import relayout
from deeplink.bench.relayout import DIM, HEADS, LAYERS, Case
from deeplink.bench.scale import Scale
from deeplink.bench.timing import take_turns
from deeplink.kvconnector.layouts.catalogue import LAYOUTS
from deeplink.kvconnector.relayout import compiled

CASES = {
    "relayout_cpu_vec": Case(LAYOUTS["vllm-cpu-vec"], 128, 0.5, written="vec"),
    "digest_cpu_vec": Case(LAYOUTS["vllm-cpu-vec"], 128, 0.5, ("digest",), written="vec"),
    "relayout_cpu_vec_fp16": Case(LAYOUTS["vllm-cpu-vec"], 128, 0.5, written="vec", dtype="float16"),
    "relayout_cpu_vec_fp32": Case(LAYOUTS["vllm-cpu-vec"], 128, 0.5, written="vec", dtype="float32"),
    "relayout_cpu_amx": Case(LAYOUTS["vllm-cpu-amx"], 128, 0.5, written="amx"),
    "digest_cpu_amx": Case(LAYOUTS["vllm-cpu-amx"], 128, 0.5, ("digest",), written="amx"),
    "relayout_nhd": Case(LAYOUTS["vllm-nhd"], 16, 0.85),
    "relayout_nhd_reblock": Case(LAYOUTS["vllm-nhd"], 128, 0.85),
    "relayout_hnd": Case(LAYOUTS["vllm-hnd"], 16, 0.85),
    "relayout_kv_in_block": Case(LAYOUTS["vllm-kv-in-block"], 16, 0.85),
    "relayout_kv_first": Case(LAYOUTS["lmdeploy-cuda"], 64, 0.85),
    "relayout_head_slice": Case(LAYOUTS["vllm-nhd"], 16, 0.85, of_heads=2 * HEADS),
    "relayout_separate_slots": Case(LAYOUTS["sglang-nhd"], 1, 0.85),
    "relayout_separate_hnd": Case(LAYOUTS["lmdeploy-cambricon"], 64, 0.85),
    "relayout_nz": Case(LAYOUTS["vllm-ascend-310p"], 128, 0.45),
    "relayout_rocm": Case(LAYOUTS["vllm-rocm-16bit"], 16, None),
    "relayout_vectorized_5d": Case(LAYOUTS["sglang-vectorized-5d-16bit"], 16, None),
}
"""Its name, and what it is; `digest` of a chunk in wire form comes by itself."""
DIGEST = relayout.PLAIN_DIGEST


def measure(names: list[str], scale: Scale) -> Iterator[Row]:
    """The plain copies first, then the rows of each name."""
    yield from copies(scale)
    for name in names:
        found = relayout.plain_digest(scale) if name == DIGEST else None
        for row in found or relayout.measure_case(name, CASES[name], None, scale, anyhow=True):
            if isinstance(row, Row):
                yield row


def copies(scale: Scale) -> Iterator[Row]:
    """Of the bytes that 16-bit cases move, as numpy does it and as the mark does."""
    shape = LAYERS, 2, HEADS, scale.tokens, DIM
    source, target = relayout.memory(shape), relayout.staged(shape)
    mark_name, copy = relayout.marked()
    actions = {"numpy copyto": lambda: np.copyto(target, source), mark_name: lambda: copy(target, source)}
    best = take_turns(actions, relayout.ROUNDS * scale.rounds)
    size = target.nbytes / 1e9
    for name in actions:
        value, mark = best[name].per_second(size), best[mark_name].per_second(size)
        yield Row("copy_" + name.split()[0], value, "GB/s", mark_name, mark, cpu_s_per_gb=best[name].cpu / size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[DIGEST, *CASES], metavar="NAME")
    parser.add_argument("--tokens", type=int, default=Scale().tokens, help="of 64 KiB each; a multiple of 128")
    parser.add_argument("--rounds", type=int, default=Scale().rounds, help="five passes each")
    parser.add_argument("--by", choices=["numpy", "numba"], help="insist on these loops")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--save", action="store_true", help="write it to benchmarks/results and README.md")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - {DIGEST, *CASES}:
        parser.error(f"no case is called {', '.join(sorted(unknown))}; there are {', '.join([DIGEST, *CASES])}")
    if arguments.by:
        os.environ[compiled.VARIABLE] = arguments.by
    about = machine() | {"loops": "numba" if compiled.wanted() else "numpy", "warm_seconds": round(compiled.warm(), 2)}
    rows = list(measure(arguments.names, Scale(arguments.rounds, arguments.tokens)))
    result = {"machine": about, "rows": [row.as_json() for row in rows]}
    if arguments.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "relayout.json").write_text(json.dumps(result, indent=2) + "\n")
        write_table("relayout", result)
    print(json.dumps(result) if arguments.json else table(result["rows"]))


if __name__ == "__main__":
    # One thread: what a handoff has, beside an engine that computes.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
