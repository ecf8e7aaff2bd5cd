"""Every layout of the catalogue: the bytes an engine would write, and the way to and from every other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from golden import GOLDEN
from hypothesis import given, settings
from hypothesis import strategies as st

from deeplink.errors import LayoutError
from deeplink.kvconnector.caches.cache import Cache
from deeplink.kvconnector.layouts.catalogue import ENTRIES, LAYOUTS, Entry
from deeplink.kvconnector.layouts.layout import ELEMENTS, RECORDS, Bound, Layout
from deeplink.kvconnector.relayout.convert import storage_dtype
from deeplink.kvconnector.relayout.plan import Chunk

pytestmark = pytest.mark.usefixtures("way")

LAYERS, BLOCKS = 2, 4
TABLE = [3, 1, 2]
CASES = [(entry, dtype) for entry in ENTRIES for dtype in entry.dtypes]


def test_the_catalogue_is_complete_and_clear() -> None:
    assert set(LAYOUTS) == set(GOLDEN)
    assert len(LAYOUTS) == len(ENTRIES)
    for entry in ENTRIES:
        assert entry.dtypes
        assert set(entry.dtypes) <= set(ELEMENTS)
        assert entry.block_sizes
        assert entry.source
        assert str(Layout.parse(entry.layout)) == entry.layout


def test_the_documentation_has_every_entry() -> None:
    lines = (Path(__file__).parents[3] / "docs" / "layouts.md").read_text().splitlines()
    for entry in ENTRIES:
        layout = entry.layout.replace("|", "\\|")
        who = f"{entry.engine}; {entry.chip}"
        assert f"| `{entry.name}` | {who} | `{layout}` | {entry.block_sizes[0]} | {entry.status} |" in lines


@pytest.mark.parametrize(("entry", "dtype"), CASES, ids=lambda value: getattr(value, "name", value))
def test_every_usual_block_size_can_be_bound(entry: Entry, dtype: str) -> None:
    vector = GOLDEN[entry.name].H == 1
    for size in entry.block_sizes:
        dim = RECORDS.get(dtype, 576 if vector else 128)
        bound = Layout.parse(entry.layout).bind(heads=1 if vector else 8, head_dim=dim, block_size=size, blocks=3)
        assert sum(bound.elements(tensor) for tensor in range(bound.tensors)) == 3 * bound.block_elements


@pytest.mark.parametrize(("entry", "dtype"), CASES, ids=lambda value: getattr(value, "name", value))
def test_bytes_are_those_of_the_golden_cache(entry: Entry, dtype: str) -> None:
    golden, storage = GOLDEN[entry.name], storage_dtype(dtype)
    sizes = {"heads": golden.H, "head_dim": golden.D, "block_size": golden.N}
    bound = Layout.parse(entry.layout).bind(**sizes, blocks=BLOCKS)
    first, stop = 3, len(TABLE) * golden.N - 2
    shape = (LAYERS, bound.kv, golden.H, stop - first, golden.D)
    rng = np.random.default_rng(0)
    wire = rng.integers(0, np.iinfo(storage).max, shape, storage, endpoint=True)
    should = [
        np.full(tensor, 0xA5, storage)
        for _ in range(LAYERS)
        for tensor in golden.shapes(BLOCKS, golden.N, golden.H, golden.D)
    ]
    cache = Cache(tuple(np.full(math.prod(tensor.shape), 0xA5, storage) for tensor in should), bound)
    for layer, kv, h, at, d in itertools.product(*map(range, shape)):
        block, n = divmod(first + at, golden.N)
        tensor, index = golden.place(kv, TABLE[block], n, h, d)
        should[layer * bound.tensors + tensor][index] = wire[layer, kv, h, at, d]
    cache.scatter(wire, first, TABLE, Chunk(first, stop))
    for got, wanted in zip(cache.layers, should, strict=True):
        assert got.tobytes() == wanted.tobytes()
    back = np.zeros_like(wire)
    cache.gather(TABLE, Chunk(first, stop), back)
    assert back.tobytes() == wire.tobytes()


def make(bound: Bound, dtype: str, seed: int) -> Cache:
    rng = np.random.default_rng(seed)
    storage = storage_dtype(dtype)
    sizes = [bound.elements(tensor) for tensor in range(bound.tensors)] * LAYERS
    return Cache(tuple(rng.integers(0, np.iinfo(storage).max, n, storage, endpoint=True) for n in sizes), bound)


def partners(entry: Entry, dtype: str) -> Iterator[Entry]:
    """Layouts of the same dtype and of as many vectors a token."""
    for other in ENTRIES:
        if dtype in other.dtypes and (GOLDEN[entry.name].H == 1) == (GOLDEN[other.name].H == 1):
            yield other


@settings(deadline=None, max_examples=4)
@given(st.data())
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_to_every_other_layout_and_back(entry: Entry, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(entry.dtypes))
    vector = GOLDEN[entry.name].H == 1
    heads = 1 if vector else data.draw(st.integers(1, 3))
    dim = RECORDS.get(dtype, 576 if vector else data.draw(st.sampled_from([16, 32, 48])))
    # Both AMX and the vectorised layouts want multiples of 16, slots may be as small as 1.
    size = data.draw(st.sampled_from([16, 32, 48]))
    bound = Layout.parse(entry.layout).bind(heads=heads, head_dim=dim, block_size=size, blocks=5)
    table = data.draw(st.permutations(range(5)))
    start = data.draw(st.integers(0, 4 * size))
    chunk = Chunk(start, data.draw(st.integers(start + 1, 5 * size)))
    source = make(bound, dtype, seed=1)
    wire = np.empty(source.wire_shape(chunk.tokens), source.dtype)
    source.gather(table, chunk, wire)
    for number, other in enumerate(partners(entry, dtype)):
        theirs = data.draw(st.sampled_from([16, 32, 64] if "%" in other.layout else [1, 3, 16, 20]))
        blocks = -(-chunk.stop // theirs)
        their_table = list(np.random.default_rng(number).permutation(blocks))
        layout = Layout.parse(other.layout)
        target = make(layout.bind(heads=heads, head_dim=dim, block_size=theirs, blocks=blocks), dtype, seed=2)
        target.scatter(wire, chunk.start, their_table, chunk)
        back = np.empty_like(wire)
        target.gather(their_table, chunk, back)
        assert back.tobytes() == wire.tobytes(), other.name
        # Home again, into a cache in which every bit of every element is wrong.
        home = Cache(tuple(~layer for layer in source.layers), bound)
        home.scatter(back, chunk.start, table, chunk)
        right = [np.count_nonzero(a == b) for a, b in zip(home.layers, source.layers, strict=True)]
        assert sum(right) == wire.size, other.name


def test_layers_inside_a_block_are_wider_strides() -> None:
    layout, (H, N, D) = Layout.parse(LAYOUTS["vllm-hnd"]), (3, 8, 4)
    wire = np.random.default_rng(0).integers(0, 1 << 16, (LAYERS, 2, H, 2 * N, D), np.uint16)
    content = wire.transpose(3, 0, 2, 4, 1).reshape(2, N, LAYERS, H, D, 2)  # [b, n, layer, head, dim, kv]

    def scattered(shape: tuple[int, ...], layer_axis: int, **strides: int) -> np.ndarray:
        pool = np.zeros(shape, np.uint16)
        bound = layout.bind(heads=H, head_dim=D, block_size=N, blocks=BLOCKS, strides=strides)
        step = pool.strides[layer_axis] // pool.itemsize
        layers = tuple(pool.reshape(-1)[layer * step :] for layer in range(LAYERS))
        Cache(layers, bound).scatter(wire, 0, [3, 1], Chunk(0, 2 * N))
        return pool

    blhnc = scattered((BLOCKS, LAYERS, H, N, 2 * D), 1, block=LAYERS * H * N * 2 * D)
    bhlnc = scattered((BLOCKS, H, LAYERS, N, 2 * D), 2, head=LAYERS * N * 2 * D)
    for place, block in enumerate([3, 1]):
        for layer, h, n, d in itertools.product(range(LAYERS), range(H), range(N), range(D)):
            for kv in range(2):
                value = content[place, n, layer, h, d, kv]
                assert blhnc[block, layer, h, n, kv * D + d] == value
                assert bhlnc[block, h, layer, n, kv * D + d] == value
    for pool in (blhnc, bhlnc):
        assert not pool[[0, 2]].any()


def test_aligned_blocks_leave_the_padding_alone() -> None:
    layout, (H, N, D), padded = Layout.parse(LAYOUTS["vllm-ascend-310p"]), (2, 3, 32), 256
    bound = layout.bind(heads=H, head_dim=D, block_size=N, blocks=BLOCKS, strides={"block": padded})
    pool = np.zeros((2, BLOCKS, padded), np.uint16)
    wire = np.full((1, 2, H, BLOCKS * N, D), 7, np.uint16)
    Cache((pool.reshape(-1),), bound).scatter(wire, 0, range(BLOCKS), Chunk(0, BLOCKS * N))
    assert (pool[..., : H * N * D] == 7).all()
    assert not pool[..., H * N * D :].any()
    assert bound.block_elements == 2 * padded
    assert bound.elements() == 2 * BLOCKS * padded - (padded - H * N * D)


@pytest.mark.parametrize(
    ("text", "strides", "message"),
    [
        ("block token head kv dim", {"block": 127}, "a stride of 127 for block, inside which are 128 elements"),
        ("block token head kv dim", {"head": -16}, "a stride of -16 for head"),
        ("block token head kv dim", {"dim": 0}, "a stride of 0 for dim"),
        ("block token head kv dim", {"page": 999}, "has no page to give a stride to"),
        ("block token head kv dim", {"dim/2": 999}, "has no dim/2"),
        ("block head (k: token dim | v: dim/2 token dim%2)", {"dim/2": 64}, "K and V are unequal"),
        ("block head (k: token dim | v: dim/2 token dim%2)", {"block": 2048, "dim/2": 64}, "K and V are unequal"),
    ],
)
def test_a_stride_that_cannot_be(text: str, strides: dict[str, int], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Layout.parse(text).bind(heads=2, head_dim=8, block_size=4, blocks=3, strides=strides)


def test_one_vector_a_token_has_one_head() -> None:
    with pytest.raises(LayoutError, match="so one head, not 2"):
        Layout.parse("block token dim").bind(heads=2, head_dim=8, block_size=4)
    with pytest.raises(LayoutError, match="dim has 576, which is not the sum of its parts"):
        Layout.parse("dim 512+32 | block token dim").bind(heads=1, head_dim=576, block_size=4)
    with pytest.raises(LayoutError, match="at least 1"):
        Layout.parse("block token dim").bind(heads=1, head_dim=8, block_size=0)


def test_tensors_must_come_in_pairs() -> None:
    bound = Layout.parse(LAYOUTS["sglang-nhd"]).bind(heads=2, head_dim=4, block_size=1, blocks=8)
    cache = Cache(tuple(np.zeros(64, np.uint16) for _ in range(3)), bound)
    with pytest.raises(LayoutError, match="3 arrays for layers that have 2 tensors"):
        cache.gather([1, 2], Chunk(0, 2), np.zeros((1, 2, 2, 2, 4), np.uint16))
