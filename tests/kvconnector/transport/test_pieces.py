"""Pushes become few, bounded batches of addresses, and every byte is in exactly one of them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.kvconnector.transport.base import Push
from deeplink.kvconnector.transport.pieces import Pieces, address, batches, ranges, read

SOURCE = bytearray(4096)


def pieces(pushes: list[Push], bases: dict[bytes, int]) -> Pieces:
    wanted = read(pushes)
    return wanted.pieces([bases[span.key] for span in wanted.spans], wanted.addresses())


HERE = address(memoryview(SOURCE))


@given(
    st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 96), st.sampled_from([b"a", b"b"]), st.integers(0, 9999))),
    st.integers(1, 200),
    st.integers(1, 7),
)
def test_every_byte_goes_where_it_was_to_go(
    chosen: list[tuple[int, int, bytes, int]], most_bytes: int, most_pieces: int
) -> None:
    view = memoryview(SOURCE)
    pushes = [Push(view[start : start + size], key, offset) for start, size, key, offset in chosen]
    bases = {b"a": 1 << 40, b"b": 1 << 41}
    wanted = sorted(
        (HERE + start + byte, bases[key] + offset + byte) for start, size, key, offset in chosen for byte in range(size)
    )
    made = pieces(pushes, bases)
    got = []
    for batch in batches(made, most_bytes, most_pieces):
        assert 1 <= len(batch) <= most_pieces
        assert int(batch.length.sum()) <= most_bytes
        assert batch.length.min() > 0
        got += _bytes(batch)
    assert sorted(got) == wanted
    covered = ranges(made)
    assert all(first + size < start for (first, size), (start, _) in pairwise(covered))
    assert {byte for start, size in covered for byte in range(start, start + size)} == {ours for ours, _ in wanted}


def _bytes(made: Pieces) -> list[tuple[int, int]]:
    every = zip(made.source.tolist(), made.target.tolist(), made.length.tolist(), strict=True)
    return [(source + byte, target + byte) for source, target, length in every for byte in range(length)]


def test_neighbours_on_both_sides_become_one() -> None:
    view = memoryview(SOURCE)
    order = np.random.default_rng(0).permutation(64).tolist()
    made = pieces([Push(view[index * 64 : index * 64 + 64], b"a", index * 64) for index in order], {b"a": 500})
    assert (made.source.tolist(), made.target.tolist(), made.length.tolist()) == ([HERE], [500], [4096])
    apart = pieces([Push(view[:64], b"a", 64), Push(view[64:128], b"a", 0)], {b"a": 500})
    assert apart.target.tolist() == [564, 500]


def test_the_hull_of_each_region_is_asked_for() -> None:
    view = memoryview(SOURCE)
    pushes = [Push(view[:10], b"a", 100), Push(view[:5], b"b", 7), Push(view[:10], b"a", 50), Push(view[:0], b"c", 3)]
    assert [(span.key, span.low, span.high) for span in read(pushes).spans] == [
        (b"a", 50, 110),
        (b"b", 7, 12),
        (b"c", 3, 3),
    ]


@pytest.mark.parametrize("memory", [bytearray(b"abc"), b"abc", np.arange(3)])
def test_the_address_of_any_memory(memory: bytes) -> None:
    view = memoryview(memory)
    assert address(view[1:]) - address(view) == view.itemsize
    assert address(view[:0]) == 0
