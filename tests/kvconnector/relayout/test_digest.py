"""The digest: the same for the same KV however it is packed and cut, another for anything else."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_layouts import Sized, layouts, tables

from deeplink.errors import LayoutError
from deeplink.kvconnector.caches.cache import Cache
from deeplink.kvconnector.relayout import convert, digest, in_blocks
from deeplink.kvconnector.relayout.digest import Sample
from deeplink.kvconnector.relayout.plan import TILE, Chunk, Run, chunks, runs

pytestmark = pytest.mark.usefixtures("way")

LAYERS, HEADS, DIM = 3, 2, 4
KNOWN = 0xF221D7731797A992


def content(tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 16, (LAYERS, 2, HEADS, tokens, DIM), np.uint16)


def cut(wire: np.ndarray, chunk: Chunk) -> np.ndarray:
    return np.ascontiguousarray(wire[:, :, :, chunk.start : chunk.stop])


def total(wire: np.ndarray, start: int = 0) -> int:
    return digest.total(digest.tiles(Chunk(start, start + wire.shape[3]), wire))


def through(sized: Sized, wire: np.ndarray, limit: int, seed: int) -> int:
    """The digest of `wire` after a stay in a cache of this layout, read back in chunks."""
    bound = sized.bind()
    cache = Cache(tuple(np.zeros(size, np.uint16) for size in sized.tensors * LAYERS), bound)
    table = list(np.random.default_rng(seed).permutation(bound.blocks))
    tokens = wire.shape[3]
    cache.scatter(wire, 0, table, Chunk(0, tokens))
    found = 0
    for chunk in chunks(0, tokens, limit):
        part = np.empty(cache.wire_shape(chunk.tokens), cache.dtype)
        cache.gather(table, chunk, part)
        found += digest.total(digest.tiles(chunk, part))
    return found & ((1 << 64) - 1)


@given(st.data())
def test_no_layout_block_size_or_chunking_enters(data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, 70))
    wire = content(tokens)
    results = {total(wire)}
    for seed in range(2):
        drawn = data.draw(layouts(heads=HEADS, dim=DIM))
        blocks = -(-tokens // drawn.block_size) + 1
        sized = Sized(drawn.text, blocks, HEADS, drawn.block_size, DIM)
        results.add(through(sized, wire, data.draw(st.integers(1, 80)), seed))
    assert len(results) == 1


CHANGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "one bit": lambda w: _flip(w, (1, 0, 1, 20, 3)),
    "first bit": lambda w: _flip(w, (0, 0, 0, 0, 0)),
    "last bit": lambda w: _flip(w, (-1, -1, -1, -1, -1)),
    "two tokens of a tile swapped": lambda w: w[:, :, :, _swap(40, 3, 9)],
    "two tokens of different tiles swapped": lambda w: w[:, :, :, _swap(40, 3, 35)],
    "two tiles swapped": lambda w: w[:, :, :, np.r_[16:32, 0:16, 32:40]],
    "heads swapped": lambda w: w[:, :, ::-1],
    "K and V swapped": lambda w: w[:, ::-1],
    "two layers swapped": lambda w: w[[1, 0, 2]],
    "dims rotated": lambda w: np.roll(w, 1, axis=-1),
    "one token short": lambda w: w[:, :, :, :-1],
}


def _flip(wire: np.ndarray, at: tuple[int, ...]) -> np.ndarray:
    changed = wire.copy()
    changed[at] ^= 1
    return changed


def _swap(tokens: int, a: int, b: int) -> np.ndarray:
    order = np.arange(tokens)
    order[[a, b]] = b, a
    return order


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_shows(change: str) -> None:
    wire = content(40)
    assert total(np.ascontiguousarray(CHANGES[change](wire))) != total(wire)


@given(st.integers(0, 2), st.integers(0, 1), st.integers(0, 1), st.integers(0, 39), st.integers(0, 3))
def test_a_flipped_bit_shows_in_its_tile_alone(layer: int, side: int, head: int, token: int, dim: int) -> None:
    wire = content(40)
    changed = _flip(wire, (layer, side, head, token, dim))
    differ = digest.tiles(Chunk(0, 40), wire) != digest.tiles(Chunk(0, 40), changed)
    assert np.argwhere(differ).tolist() == [[layer, side, head, token // TILE]]


def test_zeros_have_a_place_too() -> None:
    """Equal content at another layer, head, side or tile is not the same."""
    zeros = np.zeros((LAYERS, 2, HEADS, 48, DIM), np.uint16)
    tiles = digest.tiles(Chunk(0, 48), zeros)
    assert len(set(tiles.reshape(-1).tolist())) == tiles.size


@pytest.mark.parametrize("start", [16, 32, 5, 37])
def test_a_suffix_is_verifiable_alone(start: int) -> None:
    wire = content(60)
    whole = digest.tiles(Chunk(0, 60), wire)
    suffix = digest.tiles(Chunk(start, 60), cut(wire, Chunk(start, 60)))
    # Its first tile is partial when the suffix begins inside one; the others are the whole's.
    skip = int(start % TILE > 0)
    np.testing.assert_array_equal(suffix[..., skip:], whole[..., start // TILE + skip :])


@pytest.mark.parametrize(("layers", "heads"), [((0, 1), (0, 2)), ((1, 3), (0, 2)), ((0, 3), (1, 2))])
def test_a_rank_is_verifiable_alone(layers: tuple[int, int], heads: tuple[int, int]) -> None:
    wire = content(40)
    part = np.ascontiguousarray(wire[slice(*layers), :, slice(*heads)])
    got = digest.tiles(Chunk(0, 40), part, first_layer=layers[0], first_head=heads[0])
    np.testing.assert_array_equal(got, digest.tiles(Chunk(0, 40), wire)[slice(*layers), :, slice(*heads)])


@given(st.integers(0, 40), st.integers(1, 60))
def test_one_digest_per_tile(start: int, tokens: int) -> None:
    chunk = Chunk(start, start + tokens)
    tiles = digest.tiles(chunk, content(tokens))
    assert tiles.shape == (LAYERS, 2, HEADS, (chunk.stop - 1) // TILE - start // TILE + 1)


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@given(st.integers(0, 20), st.integers(1, 70), st.integers(1, 80))
def test_the_compiled_function_is_that_of_the_xxhash_package(itemsize: int, start: int, tokens: int, dim: int) -> None:
    """Tiles of every length that the function treats in its own way: up to 3, 8, 16, 128 and 240 bytes, and longer."""
    wire = np.random.default_rng(dim).integers(0, 256, (1, 2, 2, tokens, dim), np.uint8).astype(f"u{itemsize}")
    chunk = Chunk(start, start + tokens)
    by_numba = digest.tiles(chunk, wire, 3, 5, by="numba")
    np.testing.assert_array_equal(by_numba, digest.tiles(chunk, wire, 3, 5, by="numpy"))


samples = st.integers(2, 9).flatmap(
    lambda every: st.builds(Sample, every=st.just(every), offset=st.integers(0, every - 1))
)


@given(st.integers(0, 40), st.integers(1, 300), samples)
def test_a_sample_is_some_of_the_tiles(start: int, tokens: int, sample: Sample) -> None:
    wire, chunk = content(tokens), Chunk(start, start + tokens)
    all_of_them = digest.tiles(chunk, wire, 2, 1)
    some = digest.tiles(chunk, wire, 2, 1, sample=sample)
    sums = np.indices(some.shape).sum(axis=0) + 2 + 1 + start // TILE + sample.offset
    np.testing.assert_array_equal(some, np.where(sums % sample.every == 0, all_of_them, 0))


@given(samples, st.integers(0, 50), st.sampled_from(["tile", "head", "layer"]))
def test_no_run_of_wrong_tiles_slips_through(sample: Sample, first: int, along: str) -> None:
    every = sample.every
    shape = {"tile": (1, 2, 1, every), "head": (1, 2, every, 1), "layer": (every, 2, 1, 1)}[along]
    wire = np.zeros((*shape[:3], shape[3] * TILE, DIM), np.uint16)
    tiles = digest.tiles(Chunk(first * TILE, (first + shape[3]) * TILE), wire, first, first, sample=sample)
    assert (np.count_nonzero(tiles, axis=(0, 2, 3)) == 1).all()  # one of K and one of V


@given(samples)
def test_a_part_has_the_sample_of_the_whole(sample: Sample) -> None:
    wire = content(100)
    whole = digest.tiles(Chunk(0, 100), wire, sample=sample)
    part = np.ascontiguousarray(wire[1:, :, 1:, 32:])
    got = digest.tiles(Chunk(32, 100), part, first_layer=1, first_head=1, sample=sample)
    np.testing.assert_array_equal(got, whole[1:, :, 1:, 2:])


def test_known_values() -> None:
    """Both sides of a handoff may be of unlike releases: the numbers stay as they are."""
    wire = np.arange(2 * 2 * 2 * 40 * 8, dtype=np.uint16).reshape(2, 2, 2, 40, 8)
    tiles = digest.tiles(Chunk(5, 45), wire, first_layer=1, first_head=4)
    assert tiles.shape == (2, 2, 2, 3)
    assert digest.total(tiles) == KNOWN


@given(st.data())
def test_the_digest_in_the_blocks_is_that_of_the_wire(data: st.DataObject) -> None:
    sized = data.draw(layouts())
    table, chunk = data.draw(tables(sized))
    bound = sized.bind()
    rng = np.random.default_rng(2)
    caches = [rng.integers(0, 1 << 16, size, np.uint16) for size in sized.tensors * LAYERS]
    wire = np.empty(convert.wire_shape(bound, LAYERS, chunk.tokens), np.uint16)
    convert.gather(caches, bound, runs(table, sized.block_size, chunk), wire)
    got = in_blocks.tiles(caches, bound, runs(table, sized.block_size, chunk), chunk, first_layer=2, first_head=1)
    np.testing.assert_array_equal(got, digest.tiles(chunk, wire, first_layer=2, first_head=1))


@pytest.mark.parametrize("tokens", [700, 1000])
@pytest.mark.parametrize("block_size", [1, 48, 128, 300])
def test_slices_in_the_blocks_are_cut_where_it_suits_them(block_size: int, tokens: int) -> None:
    """More than one slice, whose edges are not those of blocks or runs."""
    sized = Sized("block head (k: dim token | v: token dim)", 1100 // block_size + 2, 2, block_size, 128)
    bound = sized.bind()
    rng = np.random.default_rng(3)
    caches = [rng.integers(0, 1 << 32, size, np.uint32) for size in sized.tensors]
    table = [*range(bound.blocks // 2, bound.blocks), *range(bound.blocks // 2)]
    chunk = Chunk(37, 37 + tokens)
    wire = np.empty(convert.wire_shape(bound, 1, tokens), np.uint32)
    convert.gather(caches, bound, runs(table, block_size, chunk), wire)
    got = in_blocks.tiles(caches, bound, runs(table, block_size, chunk), chunk)
    np.testing.assert_array_equal(got, digest.tiles(chunk, wire))


def test_the_digest_in_the_blocks_wants_all_of_the_chunk() -> None:
    bound = Sized("block token head (kv dim)", 4, HEADS, 8, DIM).bind()
    caches = [np.zeros(bound.elements(), np.uint16)]
    for where in ([Run(1, 1, 0, 8, 0)], [Run(1, 1, 0, 8, 8)], [Run(1, 1, 0, 8, 0), Run(2, 1, 0, 4, 12)]):
        with pytest.raises(LayoutError):
            in_blocks.tiles(caches, bound, where, Chunk(0, 16))
    with pytest.raises(LayoutError):
        in_blocks.tiles([caches[0][:-1]], bound, runs([1, 2], 8, Chunk(0, 16)), Chunk(0, 16))
    with pytest.raises(LayoutError):
        in_blocks.tiles([], bound, runs([1, 2], 8, Chunk(0, 16)), Chunk(0, 16))
