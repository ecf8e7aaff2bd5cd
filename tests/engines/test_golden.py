"""Every packing, block size and element type to every other: the bytes are those that the engine's own kernel writes.

The kernel writes the values of the prefill engine's type into a cache of that type, which is handed over, and as torch
converts them into one of the decode engine's type, which is what must come of it. All of it goes the way that a handoff
goes, except the link.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleet import DEFAULT, VERSIONS, Fleet
from matrix import Matrix

from deeplink.kvconnector.caches.cache import Cache
from deeplink.kvconnector.caches.group import Group
from deeplink.kvconnector.contracts.contract import CacheGroup
from deeplink.kvconnector.contracts.negotiate import FULL
from deeplink.kvconnector.layouts.cast import between
from deeplink.kvconnector.layouts.catalogue import LAYOUTS
from deeplink.kvconnector.layouts.layout import Layout
from deeplink.kvconnector.relayout.convert import storage_dtype
from deeplink.kvconnector.relayout.plan import Chunk

HEADS, HEAD_DIM, TOKENS = 3, 64, 256
DTYPES = ("float32", "float16", "bfloat16")
PACKINGS = (("float32", "vec"), ("float16", "vec"), ("bfloat16", "vec"), ("bfloat16", "amx"))
BLOCKS = (32, 64, 128)
TABLES = {block: [(7 * at + 2) % (TOKENS // block + 1) for at in range(TOKENS // block)] for block in BLOCKS}
CHUNKS = (Chunk(0, 80), Chunk(80, 176), Chunk(176, TOKENS))
"""Their edges are inside blocks of every size; as in a handoff, they are between tiles of 16 tokens."""


@dataclass(frozen=True)
class Kept:
    """How an engine keeps its cache."""

    dtype: str
    packing: str
    block: int

    def __str__(self) -> str:
        return f"{self.dtype}-{self.packing}-{self.block}"

    def named(self, source: str) -> str:
        return f"{source}/{self.dtype}/{self.packing}/{self.block}"

    def group(self, array: np.ndarray[Any, Any]) -> Group:
        text = LAYOUTS[f"vllm-cpu-{self.packing}"]
        blocks = TOKENS // self.block + 1
        bound = Layout.parse(text).bind(heads=HEADS, head_dim=HEAD_DIM, block_size=self.block, blocks=blocks)
        stated = CacheGroup(FULL, (0,), HEADS, HEAD_DIM, self.dtype, self.block, text, 0)
        return Group(stated, (0,), (0, HEADS), Cache((array,), bound))


KEPT = [Kept(dtype, packing, block) for dtype, packing in PACKINGS for block in BLOCKS]


def written(fleet: Fleet, version: str) -> dict[str, np.ndarray[Any, Any]]:
    """The caches that this version's kernel writes, by their names."""
    target = fleet.folder / f"golden-{version}.npz"
    config = {
        "heads": HEADS,
        "head_dim": HEAD_DIM,
        "tokens": TOKENS,
        "dtypes": DTYPES,
        "packings": PACKINGS,
        "blocks": BLOCKS,
        "tables": TABLES,
    }
    command = [fleet.of(version).python, Path(__file__).with_name("write_golden.py"), target, json.dumps(config)]
    env = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, check=True, capture_output=True, timeout=200, env=env, cwd=fleet.folder)
    with np.load(target) as file:
        return dict(file)


@pytest.fixture(scope="module")
def golden(fleet: Fleet) -> dict[str, np.ndarray[Any, Any]]:
    return written(fleet, DEFAULT)


@pytest.mark.parametrize("version", [version for version in VERSIONS if version != DEFAULT])
def test_every_version_writes_the_same_bytes(
    fleet: Fleet, golden: dict[str, np.ndarray[Any, Any]], matrix: Matrix, version: str
) -> None:
    other = written(fleet, version)
    assert other.keys() == golden.keys()
    assert [name for name in golden if not np.array_equal(golden[name], other[name])] == []
    matrix.note_same_bytes(version, DEFAULT)


def test_the_packings_differ(golden: dict[str, np.ndarray[Any, Any]]) -> None:
    """Else all the rest would say nothing."""
    for block in BLOCKS:
        vec, amx = (golden[f"bfloat16/bfloat16/{packing}/{block}"] for packing in ("vec", "amx"))
        assert vec.shape == amx.shape
        assert np.count_nonzero(vec != amx) > vec.size // 2


@pytest.mark.parametrize("prefill", KEPT, ids=str)
def test_bytes(golden: dict[str, np.ndarray[Any, Any]], matrix: Matrix, prefill: Kept) -> None:
    for decode in KEPT:
        source = prefill.group(golden[prefill.named(prefill.dtype)].view(storage_dtype(prefill.dtype)))
        expected = golden[decode.named(prefill.dtype)].view(storage_dtype(decode.dtype))
        # Cast by the prefill engine, and by the decode engine.
        for dtype in dict.fromkeys((prefill.dtype, decode.dtype)):
            target = decode.group(np.zeros_like(expected))
            hand_over(source, target, TABLES[prefill.block], TABLES[decode.block], dtype)
            assert np.array_equal(target.values.layers[0], expected), (decode, dtype)
        cast = between(prefill.dtype, decode.dtype)
        assert cast is not None
        matrix.record_bytes(_row(prefill), _row(decode), "exact" if cast.exact else f"lossy ({cast.name})")


def hand_over(source: Group, target: Group, from_: list[int], to: list[int], dtype: str) -> None:
    wire = source.wire(dtype)
    for chunk in CHUNKS:
        memory = memoryview(bytearray(wire.length(chunk.tokens)))
        source.stage(from_, chunk, memory, dtype)
        target.land(wire, memory, source.spec, chunk, to, chunk)


def _row(kept: Kept) -> tuple[str, int, str]:
    return kept.dtype, kept.block, {"vec": "CPU", "amx": "CPU with AMX"}[kept.packing]


def test_all_pairs_are_there() -> None:
    assert len(list(itertools.product(KEPT, KEPT))) == 144
    for block, table in TABLES.items():  # every block once but one, in another order
        assert len(set(table)) == len(table) == TOKENS // block
        assert table != sorted(table)
