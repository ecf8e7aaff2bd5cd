"""Every token is moved exactly once, in pieces of the right size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.errors import LayoutError
from deeplink.kvconnector.relayout.plan import TILE, Chunk, chunks, runs


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 200))
def test_chunks_cover_every_token_once(start: int, length: int, limit: int) -> None:
    found = list(chunks(start, start + length, limit))
    assert [t for chunk in found for t in range(chunk.start, chunk.stop)] == list(range(start, start + length))
    assert all(0 < chunk.tokens <= max(TILE, limit) for chunk in found)
    # Only the range's own ends may be inside a tile.
    borders = {chunk.start for chunk in found} | {chunk.stop for chunk in found}
    assert all(border % TILE == 0 for border in borders - {start, start + length})


@given(st.integers(0, 300), st.integers(0, 300), st.integers(TILE, 200))
def test_chunks_go_on_where_they_stopped(start: int, length: int, limit: int) -> None:
    """Cutting what is there now, and the rest later, covers the same."""
    middle = (start + length // 2) // TILE * TILE
    if middle < start:
        return
    parts = [*chunks(start, middle, limit), *chunks(middle, start + length, limit)]
    assert [t for chunk in parts for t in range(chunk.start, chunk.stop)] == list(range(start, start + length))


@given(st.data())
def test_runs_cover_every_token_once(data: st.DataObject) -> None:
    block_size = data.draw(st.integers(1, 24))
    table = data.draw(st.permutations(range(data.draw(st.integers(1, 12)))))
    start = data.draw(st.integers(0, len(table) * block_size - 1))
    chunk = Chunk(start, data.draw(st.integers(start, len(table) * block_size)))
    origin = data.draw(st.integers(0, start))
    seen = []
    for run in runs(table, block_size, chunk, origin):
        assert run.count >= 1
        assert run.tokens <= block_size - run.first
        assert run.count == 1 or (run.first, run.tokens) == (0, block_size)
        for at in range(run.count * run.tokens):
            block, row = run.block + at // run.tokens, run.first + at % run.tokens
            seen.append((origin + run.at + at, block, row))
    assert seen == [(t, table[t // block_size], t % block_size) for t in range(chunk.start, chunk.stop)]


@pytest.mark.parametrize(("table", "stop"), [([], 1), ([0], 17), ([0, 1], 33)])
def test_a_table_that_is_too_short(table: list[int], stop: int) -> None:
    with pytest.raises(LayoutError, match=f"{len(table)} blocks of 16"):
        list(runs(table, 16, Chunk(0, stop)))
