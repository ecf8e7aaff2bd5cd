"""What works with what, as the test run saw it. `docs/support-matrix.*` are written from here and never by hand."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deeplink.kvconnector.contract import Contract
from deeplink.kvconnector.negotiate import sizes

DOCS = Path(__file__).parents[2] / "docs"
PACKING = {
    "block head (k: dim token | v: token dim)": "CPU",
    "block head (k: token/16 dim/2 token%16 dim%2 | v: dim/16 token/2 dim%16 token%2)": "CPU with AMX",
    "kv | slot head dim": "NHD",
}
HEAD = """# Support matrix

Written by `make test`; do not edit. A cell is *exact* when real engines handed over and every check of the test held
(tokens equal to the decode engine alone in fp32; digests equal), *lossy (cast)* when both operators consented to a cast
whose bound docs/casts.md states, *refused (field)* when the router named the field and
no block moved. *CPU with AMX* is the packing that vLLM's AMX kernel writes; on a machine without AMX the kernel still
writes it, and the test has attention computed on an unpacked copy.

| prefill | dtype | block | packing | ranks | cache | decode | dtype | block | packing | ranks | cache | result |
|---|---|---|---|---|---|---|---|---|---|---|---|---|
"""


@dataclass
class Matrix:
    cells: dict[str, dict[str, Any]] = field(default_factory=dict)

    def record(self, prefill: Contract, decode: Contract, result: str) -> None:
        cell: dict[str, Any] = {"prefill": _side(prefill), "decode": _side(decode), "result": result}
        self.cells[json.dumps(cell, sort_keys=True)] = cell

    def write(self) -> None:
        cells = [self.cells[key] for key in sorted(self.cells)]
        found = {"cells": cells, "engines": _engines(cells)}
        (DOCS / "support-matrix.json").write_text(json.dumps(found, indent=2) + "\n")
        lines = []
        for cell in cells:
            sides = [" | ".join(map(str, cell[name].values())) for name in ("prefill", "decode")]
            lines.append(f"| {' | '.join(sides)} | *{cell['result']}* |")
        (DOCS / "support-matrix.md").write_text(HEAD + "\n".join(lines) + "\n")


def _engines(cells: list[dict[str, Any]]) -> dict[str, dict[str, list[str]]]:
    """By kind of the prefill and of the decode engine, which results there are."""
    found: dict[str, dict[str, list[str]]] = {}
    for cell in cells:
        prefill, decode = (str(cell[side]["engine"]).split()[0] for side in ("prefill", "decode"))
        results = found.setdefault(prefill, {}).setdefault(decode, [])
        if cell["result"] not in results:
            results.append(cell["result"])
    return found


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
