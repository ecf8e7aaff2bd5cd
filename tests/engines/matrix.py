"""What works with what, as the test run saw it. `docs/support-matrix.*` are written from here and never by hand.

A run replaces what the tests that ran in it had written before; what other tests have written stays. So the long tests
can be run apart from the short ones, and in parts.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import sections

from deeplink.kvconnector.contracts.contract import Contract
from deeplink.kvconnector.contracts.negotiate import sizes

DOCS = sections.DOCS
PACKING = {
    "block head (k: dim token | v: token dim)": "CPU",
    "block head (k: token/16 dim/2 token%16 dim%2 | v: dim/16 token/2 dim%16 token%2)": "CPU with AMX",
    "kv | slot head dim": "NHD",
    "block (k: token head dim | v: token head dim)": "one pool",
}
HEAD = """## Handoffs

A cell is

- *exact* when real engines handed over and every check of the test held: digests equal; in fp32 tokens equal to those
  of the decode engine alone; in 16 bits log-probabilities near its own, by how far those are from each other;
- *exact (bytes)* when what arrives is, byte for byte, what the decode engine's own kernel writes;
- *lossy (cast)* when both operators consented to a cast whose bound docs/casts.md states;
- *refused (field)* when the router named the field and no block moved;
- *untested* otherwise.

*CPU with AMX* is the packing that vLLM's AMX kernel writes; on a machine without AMX the kernel still writes it, and
the test has attention computed on an unpacked copy.

| prefill | dtype | block | packing | ranks | cache | decode | dtype | block | packing | ranks | cache | result |
|---|---|---|---|---|---|---|---|---|---|---|---|---|
"""
KINDS = """## Engines

By kind of engine, rows prefill and columns decode: what real engines showed.

"""
BYTES = """## Bytes

Every combination with one rank: caches that the engine's own kernel wrote, handed over to caches of the other form and
compared with those that the kernel writes. Rows are the prefill engine's, columns the decode engine's: type,
packing (*amx* or not) and tokens per block. *=* is exact, *~* lossy, with consent, to the nearest value of the other
type.

"""
RANKS = """## Ranks

| prefill | decode | result |
|---|---|---|
"""
TP = (1, 2)
ENGINES = ("vllm", "sglang", "lmdeploy")
SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}

Cell = dict[str, Any]


@dataclass
class Matrix:
    cells: dict[str, Cell] = field(default_factory=dict)
    bytes: dict[str, Cell] = field(default_factory=dict)
    same: dict[str, Cell] = field(default_factory=dict)

    def record(self, prefill: Contract, decode: Contract, result: str) -> None:
        _add(self.cells, {"prefill": _side(prefill), "decode": _side(decode), "result": result})

    def record_bytes(self, prefill: tuple[str, int, str], decode: tuple[str, int, str], result: str) -> None:
        """Of caches in memory: element type, tokens per block and packing of each side."""
        names = ("dtype", "block_size", "packing")
        _add(
            self.bytes,
            {"prefill": dict(zip(names, prefill, strict=True)), "decode": dict(zip(names, decode, strict=True))}
            | {"result": f"{result[:-1]}, bytes)" if result.endswith(")") else f"{result} (bytes)"},
        )

    def note_same_bytes(self, version: str, other: str) -> None:
        """The kernels of two versions of vLLM write the same bytes."""
        _add(self.same, {"versions": [version, other]})

    def write(self, there: Collection[str]) -> None:
        """`there` are all tests of the files that this session looked at, whether they ran or not."""
        ran = {cell["test"] for cells in (self.cells, self.bytes, self.same) for cell in cells.values()}
        files = {name.partition("::")[0] for name in there}
        before = json.loads((DOCS / "support-matrix.json").read_text())
        data: dict[str, list[Cell]] = {}
        for name, new in (("cells", self.cells), ("bytes", self.bytes), ("same_bytes", self.same)):
            made: dict[str, Cell] = {}
            for cell in before.get(name, ()):
                test = cell.get("test", "")
                file = test.partition("::")[0]
                kept = test in there if file in files else bool(file) and (DOCS.parent / file).exists()
                if kept and test not in ran:
                    _add(made, {key: value for key, value in cell.items() if key != "test"}, test)
            made |= new
            data[name] = [made[key] for key in sorted(made)]
        cells, golden, same = data["cells"], data["bytes"], data["same_bytes"]
        kinds = _kinds(cells)
        ranks = _ranks(cells)
        sections.write("cells", cells, _rows(cells), DOCS)
        sections.write("engines", kinds, KINDS + _by_kind(kinds), DOCS)
        sections.write("ranks", ranks, RANKS + _by_ranks(ranks), DOCS)
        if golden:
            versions = sorted({version for cell in same for version in cell["versions"]})
            said = f"The kernels of vLLM {', '.join(versions)} write the same bytes." if versions else ""
            sections.write("bytes", golden, BYTES + _grid(golden), DOCS)
            sections.write("same_bytes", same, said, DOCS)


def _add(cells: dict[str, Cell], cell: Cell, test: str = "") -> None:
    """A cell knows one test it comes from."""
    cells[json.dumps(cell, sort_keys=True)] = {
        **cell,
        "test": test or os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0],
    }


def _rows(cells: list[Cell]) -> str:
    text = HEAD
    for cell in cells:
        sides = [" | ".join(map(str, cell[name].values())) for name in ("prefill", "decode")]
        text += f"| {' | '.join(sides)} | *{cell['result']}* |\n"
    return text


def _kinds(cells: list[Cell]) -> dict[str, dict[str, list[str]]]:
    """By kind of the prefill and of the decode engine, which results there are."""
    found: dict[str, dict[str, list[str]]] = {}
    for cell in cells:
        prefill, decode = (str(cell[side]["engine"]).split()[0] for side in ("prefill", "decode"))
        results = found.setdefault(prefill, {}).setdefault(decode, [])
        if cell["result"] not in results:
            results.append(cell["result"])
    return found


def _by_kind(kinds: dict[str, dict[str, list[str]]]) -> str:
    text = f"| | {' | '.join(ENGINES)} |\n|---|{'---|' * len(ENGINES)}\n"
    for prefill in ENGINES:
        results = (kinds.get(prefill, {}).get(decode, ()) for decode in ENGINES)
        shown = (", ".join(f"*{result}*" for result in sorted(found)) or "*untested*" for found in results)
        text += f"| {prefill} | {' | '.join(shown)} |\n"
    return text


def _ranks(cells: list[Cell]) -> dict[str, str]:
    """By ``prefill to decode``, whether real engines of these tensor-parallel sizes have handed over."""
    found = {}
    for pair in itertools.product(TP, TP):
        wanted = [f"tp {size}" for size in pair]
        good = [
            cell
            for cell in cells
            if all(
                cell[side]["ranks"].startswith(name) for side, name in zip(("prefill", "decode"), wanted, strict=True)
            )
            and not cell["result"].startswith("refused")
        ]
        found[" to ".join(wanted)] = "see above" if good else "untested"
    return found


def _by_ranks(ranks: dict[str, str]) -> str:
    return "".join(f"| {' | '.join(pair.split(' to '))} | *{said}* |\n" for pair, said in ranks.items())


def _grid(golden: list[Cell]) -> str:
    order = [tuple(cell[side].values()) for cell in golden for side in ("prefill", "decode")]
    kept = sorted(dict.fromkeys(order), key=lambda one: (list(SHORT).index(one[0]), one[2], one[1]))
    marks = {
        (tuple(cell["prefill"].values()), tuple(cell["decode"].values())): "=" if "exact" in cell["result"] else "~"
        for cell in golden
    }
    names = [f"{SHORT[dtype]}{' amx' if 'AMX' in packing else ''} {block}" for dtype, block, packing in kept]
    text = f"| | {' | '.join(names)} |\n|---|{'---|' * len(names)}\n"
    for name, prefill in zip(names, kept, strict=True):
        text += f"| {name} | {' | '.join(marks.get((prefill, decode), '?') for decode in kept)} |\n"
    return text


def _side(contract: Contract) -> dict[str, object]:
    group = contract.groups[0]
    return {
        "engine": f"{contract.engine} {contract.engine_version}",
        "dtype": group.dtype,
        "block_size": group.block_size,
        "packing": PACKING[group.layout],
        "ranks": sizes(contract).removesuffix(", dp 1"),
        "cache": ", ".join(dict.fromkeys(group.kind for group in contract.groups)),
    }
