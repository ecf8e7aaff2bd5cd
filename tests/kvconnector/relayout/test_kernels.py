"""Compiled loops, numpy's and torch's, for every layout of the catalogue, at sizes that lines of memory fit into."""

from __future__ import annotations

import sys
from functools import partial

import numpy as np
import pytest
import relayout_check
from hypothesis import given
from hypothesis import strategies as st
from numba.core.errors import NumbaError
from random_layouts import layouts, tables
from relayout_check import cases, guarded, intact

from deeplink.errors import ConfigError, LayoutError
from deeplink.kvconnector.caches.cache import Cache
from deeplink.kvconnector.layouts.catalogue import Entry
from deeplink.kvconnector.layouts.layout import ELEMENTS, Layout
from deeplink.kvconnector.relayout import compiled, convert, device, kernels
from deeplink.kvconnector.relayout.plan import Chunk, runs

WAYS = ["numpy", "numba", "numba, streaming"]
CASES = pytest.mark.parametrize(("entry", "dtype"), cases(), ids=lambda value: getattr(value, "name", value))


def check(way: str, monkeypatch: pytest.MonkeyPatch, entry: Entry, dtype: str, shift: int = 0, wide: int = 0) -> None:
    monkeypatch.setattr(kernels, "STREAMED", 0 if way == "numba, streaming" else 1 << 40)
    by = "numpy" if way == "numpy" else "numba"
    relayout_check.check(entry, dtype, partial(convert.gather, by=by), partial(convert.scatter, by=by), shift, wide)


@CASES
@pytest.mark.parametrize("way", WAYS)
def test_every_layout(monkeypatch: pytest.MonkeyPatch, way: str, entry: Entry, dtype: str) -> None:
    check(way, monkeypatch, entry, dtype)


@CASES
@pytest.mark.parametrize("shift", [32, 0])
def test_memory_that_is_not_aligned(monkeypatch: pytest.MonkeyPatch, entry: Entry, dtype: str, shift: int) -> None:
    """Not to lines, and not even to vectors."""
    check("numba, streaming", monkeypatch, entry, dtype, shift or ELEMENTS[dtype])


@pytest.mark.parametrize("wide", [32, 96, 5])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("entry", "dtype"),
    [case for case in cases() if case[0].layout.startswith("block")],
    ids=lambda value: getattr(value, "name", value),
)
def test_blocks_further_apart(monkeypatch: pytest.MonkeyPatch, way: str, entry: Entry, dtype: str, wide: int) -> None:
    check(way, monkeypatch, entry, dtype, wide=wide)


@given(st.data(), st.sampled_from([0, 1 << 40]), st.sampled_from([1, 2, 4]))
def test_random_layouts_leave_the_rest_alone(data: st.DataObject, streamed: int, itemsize: int) -> None:
    """All three ways do the same, and stay inside."""
    sized = data.draw(layouts(dim=data.draw(st.sampled_from([1, 6, 16, 32, 64]))))
    table, chunk = data.draw(tables(sized))
    bound, where = sized.bind(), list(runs(table, sized.block_size, chunk))
    shift = data.draw(st.sampled_from([0, itemsize, 32]))
    results = []
    for by in ("numpy", "numba"):
        made = [guarded(n, itemsize, shift, seed) for seed, n in enumerate(sized.tensors * 2)]
        caches = [cache for cache, _ in made]
        shape = convert.wire_shape(bound, 2, chunk.tokens)
        flat, memory = guarded(int(np.prod(shape)), itemsize, shift, 9)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "STREAMED", streamed)
            wire = flat.reshape(shape)
            convert.gather(caches, bound, where, wire, by=by)
            gathered = flat.tobytes()
            convert.scatter(~wire, bound, where, caches, by=by)
        assert all(intact(*each) for each in [(flat, memory), *made])
        results.append((gathered, [cache.tobytes() for cache in caches]))
    assert results[0] == results[1]


@given(st.data())
def test_a_chunk_by_its_table_is_what_its_runs_are(data: st.DataObject) -> None:
    """Of any tokens of the wire, in blocks of which some are neighbours, the first and last partial."""
    sized = data.draw(layouts(dim=16))
    table, chunk = data.draw(tables(sized))
    bound = sized.bind()
    start = data.draw(st.integers(chunk.start, chunk.stop))
    part = Chunk(start, data.draw(st.integers(start, chunk.stop)))
    rng = np.random.default_rng(0)
    caches = tuple(rng.integers(0, 1 << 16, n, np.uint16) for n in sized.tensors * 2)
    wire = rng.integers(0, 1 << 16, convert.wire_shape(bound, 2, chunk.tokens), np.uint16)
    found, expected = [Cache(tuple(cache.copy() for cache in caches), bound) for _ in range(2)]
    where = list(runs(table, sized.block_size, part, chunk.start))
    convert.scatter(wire, bound, where, expected.layers)
    found.scatter(wire, chunk.start, table, part)
    assert all(np.array_equal(*pair) for pair in zip(found.layers, expected.layers, strict=True))
    out, reference = (np.zeros(convert.wire_shape(bound, 2, part.tokens), np.uint16) for _ in range(2))
    if part.tokens:
        convert.gather(caches, bound, list(runs(table, sized.block_size, part)), reference)
        found.gather(table, part, out)
        assert np.array_equal(out, wire[:, :, :, part.start - chunk.start : part.stop - chunk.start])
        convert.gather(found.layers, bound, list(runs(table, sized.block_size, part)), reference)
        assert np.array_equal(out, reference)


@pytest.mark.parametrize("heads", [(0, 2), (1, 3), (2, 4)])
@pytest.mark.parametrize("layout", ["kv block head token dim", "block kv head token dim", "kv block token head dim"])
@pytest.mark.parametrize("table", [[0, 1, 2, 3, 4], [4, 1, 2, 0, 3]], ids=["adjacent", "apart"])
@pytest.mark.parametrize("streamed", [0, 1 << 40])
def test_some_heads_with_gaps_between_them(
    monkeypatch: pytest.MonkeyPatch, layout: str, heads: tuple[int, int], table: list[int], streamed: int
) -> None:
    """Rows of a kilobyte or more, some of them together: what lies ahead is asked for across the gaps."""
    monkeypatch.setattr(kernels, "STREAMED", streamed)
    bound = Layout.parse(layout).bind(heads=4, head_dim=128, block_size=16, blocks=5)
    rng = np.random.default_rng(0)
    made = tuple(rng.integers(0, 1 << 16, bound.elements(0), np.uint16) for _ in range(2))
    part, chunk = Cache(made, bound).part(range(2), heads), Chunk(5, 77)
    where = list(runs(table, 16, chunk))
    found, expected = (np.zeros(part.wire_shape(chunk.tokens), np.uint16) for _ in range(2))
    part.gather(table, chunk, found)
    convert.gather(part.layers, part.bound, where, expected, by="numpy")
    assert np.array_equal(found, expected)
    others = Cache(tuple(layer.copy() for layer in made), bound).part(range(2), heads)
    part.scatter(~found, chunk.start, table, chunk)
    convert.scatter(~found, part.bound, where, others.layers, by="numpy")
    assert all(np.array_equal(*pair) for pair in zip(part.layers, others.layers, strict=True))


@pytest.mark.parametrize("by", ["numpy", "numba"])
@pytest.mark.parametrize(
    ("table", "chunk", "origin", "message"),
    [
        ([0, 1], Chunk(0, 33), 0, "tokens \\[0, 33\\) in 2 blocks of 16"),
        ([0, 4], Chunk(0, 32), 0, "that has 4"),
        ([0, -1], Chunk(16, 32), 16, "that has 4"),
        ([0, 1], Chunk(0, 32), 16, "wire chunk"),
        ([0, 1, 2], Chunk(8, 48), 0, "wire chunk"),
    ],
)
def test_a_chunk_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, by: str, table: list[int], chunk: Chunk, origin: int, message: str
) -> None:
    """Nothing moves, neither into the blocks nor out of them."""
    monkeypatch.setenv("DEEPLINK_RELAYOUT", by)
    bound = Layout.parse("block token head dim kv").bind(heads=1, head_dim=16, block_size=16, blocks=4)
    cache = Cache((np.zeros(bound.elements(0), np.uint16),), bound)
    wire = np.ones((1, 2, 1, 40, 16), np.uint16)
    with pytest.raises(LayoutError, match=message):
        cache.scatter(wire, origin, table, chunk)
    assert not cache.layers[0].any()


@CASES
@pytest.mark.parametrize("host", [("cpu",), ()])
def test_torch(monkeypatch: pytest.MonkeyPatch, entry: Entry, dtype: str, host: tuple[str, ...]) -> None:
    """Where torch is at hand; tests/engines runs the same in an engine's Python, where it always is."""
    pytest.importorskip("torch")
    monkeypatch.setattr(device, "HOST", host)
    relayout_check.check_torch(entry, dtype)


def test_what_is_insisted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(compiled.VARIABLE, raising=False)
    assert compiled.wanted()
    assert not compiled.wanted("numpy")
    monkeypatch.setenv(compiled.VARIABLE, "numpy")
    assert not compiled.wanted()
    assert compiled.wanted("numba")
    monkeypatch.setenv(compiled.VARIABLE, "fast")
    with pytest.raises(ConfigError):
        compiled.wanted()


def test_warm() -> None:
    assert compiled.warm("numpy") == 0
    assert compiled.warm("numba") > 0


def test_without_numba_numpy_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(compiled.VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr(compiled, "_usable", [])
    assert not compiled.wanted()
    assert compiled.warm() == 0
    with pytest.raises(ImportError):
        compiled.wanted("numba")


def test_a_numba_that_cannot_compile_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise NumbaError("no such processor")

    monkeypatch.delenv(compiled.VARIABLE, raising=False)
    monkeypatch.setattr(compiled, "_usable", [])
    monkeypatch.setattr(kernels, "warm", fail)
    with pytest.raises(NumbaError):
        compiled.warm("numba")
    compiled.warm()
    assert not compiled.wanted()
