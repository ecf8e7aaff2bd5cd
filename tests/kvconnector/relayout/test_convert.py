"""Re-layout against the reference: the right elements, all of them, and no others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_layouts import Sized, layouts, tables

from deeplink.errors import LayoutError
from deeplink.kvconnector.caches.cache import Cache
from deeplink.kvconnector.layouts.layout import ELEMENTS
from deeplink.kvconnector.relayout import convert
from deeplink.kvconnector.relayout.convert import gather, scatter, storage_dtype, wire_shape
from deeplink.kvconnector.relayout.plan import Chunk, Run, runs

pytestmark = pytest.mark.usefixtures("way")

LAYERS = 2
AMX = Sized("block head (k: token/4 dim/2 token%4 dim%2 | v: dim/4 token/2 dim%4 token%2)", 4, 2, 8, 8)
SPECIAL = {
    "float32": [0x7FC00001, 0x7F800001, 0xFFFFFFFF, 0x80000000, 0x7F800000, 0x00000001],
    "bfloat16": [0x7FC1, 0x7F81, 0xFFFF, 0x8000, 0x7F80, 0x0001],
    "float16": [0x7E01, 0x7C01, 0xFFFF, 0x8000, 0x7C00, 0x0001],
}
"""Quiet and signalling NaNs with payloads, negative zero, infinity, a subnormal."""
BYTES = [0x7F, 0xFF, 0x80, 0x7C, 0x00, 0x01]
"""The codes of which the 8-bit types make NaN, infinity or negative zero."""


def random_cache(sized: Sized, dtype: str = "float32", seed: int = 0) -> Cache:
    bound = sized.bind()
    rng = np.random.default_rng(seed)
    storage = storage_dtype(dtype)
    high = np.iinfo(storage).max
    return Cache(tuple(rng.integers(0, high, n, storage, endpoint=True) for n in sized.tensors * LAYERS), bound)


def by_layer(cache: Cache) -> list[np.ndarray]:
    """A copy of each layer, its tensors one after the other."""
    tensors = cache.bound.tensors
    return [np.concatenate(cache.layers[at : at + tensors]) for at in range(0, len(cache.layers), tensors)]


def places(sized: Sized, table: list[int], chunk: Chunk) -> np.ndarray:
    """Addresses ``[kv, head, token, dim]`` of the chunk's elements, by the reference."""
    tokens = np.arange(chunk.start, chunk.stop)
    blocks, rows = np.asarray(table)[tokens // sized.block_size], tokens % sized.block_size
    return sized.addresses()[:, blocks, :, rows, :].transpose(1, 2, 0, 3)


@given(st.data())
def test_gather_is_the_reference(data: st.DataObject) -> None:
    sized = data.draw(layouts())
    table, chunk = data.draw(tables(sized))
    cache = random_cache(sized)
    wire = np.empty(cache.wire_shape(chunk.tokens), cache.dtype)
    cache.gather(table, chunk, wire)
    where = places(sized, table, chunk)
    for layer, got in zip(by_layer(cache), wire, strict=True):
        np.testing.assert_array_equal(got, layer[where])


@given(st.data())
def test_scatter_writes_these_elements_and_no_others(data: st.DataObject) -> None:
    sized = data.draw(layouts())
    table, chunk = data.draw(tables(sized))
    # Of a chunk that came over the wire, only a part may be wanted.
    first = data.draw(st.integers(chunk.start, chunk.stop - 1))
    wanted = Chunk(first, data.draw(st.integers(first + 1, chunk.stop)))
    cache = random_cache(sized)
    wire = np.random.default_rng(1).integers(0, 1 << 32, cache.wire_shape(chunk.tokens), cache.dtype)
    expected = by_layer(cache)
    skip = wanted.start - chunk.start
    for layer, content in zip(expected, wire, strict=True):
        layer[places(sized, table, wanted)] = content[:, :, skip : skip + wanted.tokens]
    cache.scatter(wire, chunk.start, table, wanted)
    for layer, should in zip(by_layer(cache), expected, strict=True):
        np.testing.assert_array_equal(layer, should)


@given(st.data())
def test_between_any_two_layouts_and_back(data: st.DataObject) -> None:
    ours = data.draw(layouts())
    theirs = data.draw(layouts(heads=ours.heads, dim=ours.dim, blocks=5, kv=ours.kv))
    table, chunk = data.draw(tables(ours, most_tokens=theirs.block_size * theirs.blocks))
    stop = min(chunk.stop, theirs.block_size * theirs.blocks)
    if stop <= chunk.start:
        return
    chunk = Chunk(chunk.start, stop)
    their_table = data.draw(st.permutations(range(theirs.blocks)))
    source, target = random_cache(ours, seed=1), random_cache(theirs, seed=2)
    wire = np.empty(source.wire_shape(chunk.tokens), source.dtype)
    source.gather(table, chunk, wire)
    target.scatter(wire, chunk.start, their_table, chunk)
    back = np.empty_like(wire)
    target.gather(their_table, chunk, back)
    np.testing.assert_array_equal(back, wire)
    before = [layer.copy() for layer in source.layers]
    source.scatter(back, chunk.start, table, chunk)
    for layer, should in zip(source.layers, before, strict=True):
        np.testing.assert_array_equal(layer, should)


@pytest.mark.parametrize("dtype", ELEMENTS)
def test_special_values_keep_their_bits(dtype: str) -> None:
    cache = random_cache(AMX, dtype)
    patterns = np.array(SPECIAL.get(dtype, BYTES), cache.dtype)
    for layer in cache.layers:
        layer[:] = np.resize(patterns, layer.size)
    wire = np.empty(cache.wire_shape(19), cache.dtype)
    cache.gather([3, 0, 2], Chunk(3, 22), wire)
    np.testing.assert_array_equal(wire[0], cache.layers[0][places(AMX, [3, 0, 2], Chunk(3, 22))])
    assert set(np.unique(wire)) == set(patterns)
    assert cache.dtype.itemsize == ELEMENTS[dtype]


@pytest.mark.parametrize(
    "text",
    [
        AMX.text,
        "block head (k: dim token | v: token dim)",
        "kv block dim/2 token dim%2 head",
        "kv | (k: block head dim/4 token dim%4 | v: block head token/4 dim token%4)",
        "token/2 dim head block kv token%2",
        "head dim token block kv",
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_a_short_inner_loop_becomes_moves_of_its_own(monkeypatch: pytest.MonkeyPatch, text: str, dtype: str) -> None:
    monkeypatch.setattr(convert, "WORTHWHILE", 1)
    sized = replace(AMX, text=text)
    cache, table, chunk = random_cache(sized, dtype), [1, 2, 0], Chunk(1, 22)
    where = places(sized, table, chunk)
    wire = np.empty(cache.wire_shape(chunk.tokens), cache.dtype)
    cache.gather(table, chunk, wire)
    expected = by_layer(cache)
    for layer, got in zip(expected, wire, strict=True):
        np.testing.assert_array_equal(got, layer[where])
        layer[where] = ~got
    cache.scatter(~wire, chunk.start, table, chunk)
    for layer, should in zip(by_layer(cache), expected, strict=True):
        np.testing.assert_array_equal(layer, should)


def test_adjacent_blocks_travel_together() -> None:
    assert list(runs([2, 3, 4, 0], 8, Chunk(3, 30))) == [Run(2, 1, 3, 5, 0), Run(3, 2, 0, 8, 5), Run(0, 1, 0, 6, 21)]


@pytest.mark.parametrize(
    ("table", "chunk"),
    [
        ([0, 4], Chunk(0, 16)),
        ([0, -1], Chunk(0, 16)),
        ([3, 4], Chunk(0, 16)),
        ([0, 1], Chunk(0, 17)),
        ([0, 1], Chunk(8, 40)),
        ([], Chunk(0, 1)),
    ],
)
def test_a_wrong_table_changes_nothing(table: list[int], chunk: Chunk) -> None:
    cache = random_cache(AMX)
    before = [layer.copy() for layer in cache.layers]
    wire = np.zeros(cache.wire_shape(chunk.tokens), cache.dtype)
    with pytest.raises(LayoutError):
        cache.scatter(wire, chunk.start, table, chunk)
    wire[:] = 7
    with pytest.raises(LayoutError):
        cache.gather(table, chunk, wire)
    assert (wire == 7).all()
    for layer, should in zip(cache.layers, before, strict=True):
        np.testing.assert_array_equal(layer, should)


def wires() -> dict[str, np.ndarray]:
    shape = wire_shape(AMX.bind(), LAYERS, 16)
    return {
        "too few tokens": np.zeros((*shape[:3], 15, shape[4]), np.uint32),
        "too few layers": np.zeros((1, *shape[1:]), np.uint32),
        "too many layers": np.zeros((3, *shape[1:]), np.uint32),
        "other heads": np.zeros((*shape[:2], 3, *shape[3:]), np.uint32),
        "other dim": np.zeros((*shape[:4], 4), np.uint32),
        "other type": np.zeros(shape, np.uint16),
        "not dense": np.zeros((*shape[:4], 16), np.uint32)[..., ::2],
        "other rank": np.zeros(shape[1:], np.uint32),
    }


@pytest.mark.parametrize("fault", wires())
def test_a_wrong_wire_changes_nothing(fault: str) -> None:
    cache = random_cache(AMX)
    before = [layer.copy() for layer in cache.layers]
    with pytest.raises(LayoutError):
        cache.scatter(wires()[fault], 0, [1, 3], Chunk(0, 16))
    with pytest.raises(LayoutError):
        cache.gather([1, 3], Chunk(0, 16), wires()[fault])
    for layer, should in zip(cache.layers, before, strict=True):
        np.testing.assert_array_equal(layer, should)


def test_a_chunk_before_the_wire_begins_changes_nothing() -> None:
    cache = random_cache(AMX)
    before = cache.layers[0].copy()
    with pytest.raises(LayoutError):
        cache.scatter(np.zeros(cache.wire_shape(16), cache.dtype), 4, [1, 3], Chunk(0, 16))
    np.testing.assert_array_equal(cache.layers[0], before)


def test_a_cache_smaller_than_its_layout_changes_nothing() -> None:
    bound = AMX.bind()
    whole = np.zeros(bound.blocks * bound.block_elements, np.uint32)
    wire = np.ones(wire_shape(bound, 2, 16), np.uint32)
    with pytest.raises(LayoutError):
        scatter(wire, bound, runs([1, 3], 8, Chunk(0, 16)), [whole, whole[:-1].copy()])
    assert not whole.any()
    with pytest.raises(LayoutError):
        gather([whole.reshape(2, -1)] * 2, bound, runs([1, 3], 8, Chunk(0, 16)), wire)
    assert (wire == 1).all()
    # The bound may name fewer blocks than there are.
    scatter(wire, replace(bound, blocks=3), runs([1, 2], 8, Chunk(0, 16)), [whole, whole.copy()])
    assert whole.any()
