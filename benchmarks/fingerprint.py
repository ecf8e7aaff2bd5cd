"""The fingerprint of a checkpoint of 100 GB, as one would be on disk: 20 files, 723 tensors.

    python benchmarks/fingerprint.py [--json] [--save] [--folder FOLDER]

The files are sparse, so they take no space, and every byte that is read is zero. That leaves out the disk: where the
checkpoint is not in the page cache, the time a disk needs for some 2900 reads of 1 KiB, all announced at once, comes
on top. The mark is reading the headers alone, which nothing that knows the tensors' names can do without.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rows import RESULTS, Row, machine, write_table

from deeplink.kvconnector.contracts.weights import INDEX, examine

FILES, BYTES, LAYERS = 20, 100 * 10**9, 80
PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "norm", "post_norm")
SMALL = 16 << 10
"""Bytes of a norm."""


def checkpoint(folder: Path) -> None:
    names = [f"model.layers.{layer}.{part}.weight" for layer in range(LAYERS) for part in PARTS]
    names += ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    large = [name for name in names if "norm" not in name]
    size = (BYTES - SMALL * (len(names) - len(large))) // len(large) // 2 * 2
    where = {}
    for file in range(FILES):
        header, at = {}, 0
        path = folder / f"model-{file + 1:05}-of-{FILES:05}.safetensors"
        for name in names[file::FILES]:
            length = size if name in large else SMALL
            header[name] = {"dtype": "BF16", "shape": [length // 2], "data_offsets": [at, at + length]}
            at += length
            where[name] = path.name
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(path, 8 + len(text) + at)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))


def headers(folder: Path) -> None:
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            json.loads(file.read(int.from_bytes(file.read(8), "little")))


def seconds(run: Callable[[], object], rounds: int = 5) -> float:
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - began)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print only the result, as JSON")
    parser.add_argument("--save", action="store_true", help="write the result to results/ and the README")
    parser.add_argument("--folder", type=Path, help="a checkpoint of your own; the goal is for 100 GB")
    arguments = parser.parse_args()
    about = machine()
    with tempfile.TemporaryDirectory() as made:
        folder = arguments.folder or Path(made)
        if arguments.folder is None:
            checkpoint(folder)
        began = time.perf_counter()
        found = examine(folder)
        first = time.perf_counter() - began
        best, mark = seconds(lambda: examine(folder)), seconds(lambda: headers(folder))
    name = f"fingerprint_{round(found.size / 1e9)}gb"
    row = Row(name, max(first, best), "s", "headers alone", mark, 1.0, "at most", "value")
    result = {"machine": about, "rows": [row.as_json()], "coverage": str(found)}
    if arguments.save:
        (RESULTS / "fingerprint.json").write_text(json.dumps(result, indent=2) + "\n")
        write_table("fingerprint", result)
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    print(f"{row.name} {row.value:.3f} s, best {best:.3f} s; {row.mark_name} {mark:.3f} s", file=sys.stdout)
    print(found)


if __name__ == "__main__":
    main()
