"""What to move: which tokens travel together, and where they lie in each side's blocks.

A handoff moves the KV of tokens ``[start, stop)`` of one prompt. It is cut into chunks that staging can hold; each
chunk is gathered from the producer's blocks and scattered into the consumer's, and both are lists of runs. Every
token of the range is in exactly one chunk, and in exactly one run of that chunk.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from deeplink.errors import LayoutError

TILE = 16
"""Tokens per digest tile. Chunks begin and end on tiles, except where the range itself does not."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``[start, stop)`` of the prompt that are staged, sent and verified together."""

    start: int
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Run:
    """`count` physically adjacent blocks from `block` on; of each, tokens ``[first, first + tokens)``.

    They are tokens ``at, at + 1, …`` of the chunk. Only a run of one block may be partial.
    """

    block: int
    count: int
    first: int
    tokens: int
    at: int


def chunks(start: int, stop: int, limit: int) -> Iterator[Chunk]:
    """Cut ``[start, stop)`` into chunks of at most `limit` tokens (at least one tile)."""
    step = max(TILE, limit // TILE * TILE)
    while start < stop:
        end = min(stop, start // TILE * TILE + step)
        yield Chunk(start, end)
        start = end


def runs(block_table: Sequence[int], block_size: int, chunk: Chunk, origin: int | None = None) -> Iterator[Run]:
    """Where the chunk lies in blocks of `block_size` tokens.

    `block_table[i]` holds the prompt's tokens from ``i * block_size`` on. `origin` is the token at which the wire
    chunk begins, when only a part of it is meant; by default the chunk's own start. Raises LayoutError when the
    table does not reach the chunk's end.
    """
    if chunk.stop > len(block_table) * block_size:
        raise LayoutError(f"tokens [{chunk.start}, {chunk.stop}) in {len(block_table)} blocks of {block_size}")
    origin = chunk.start if origin is None else origin
    for first, tokens, count, index in _spans(block_table, block_size, chunk):
        at = index * block_size + first - origin
        yield Run(int(block_table[index]), count, first, tokens, at)


def _spans(block_table: Sequence[int], block_size: int, chunk: Chunk) -> Iterator[tuple[int, int, int, int]]:
    """First token and tokens in a block, how many adjacent blocks, and the place of the first in the table."""
    index, first = divmod(chunk.start, block_size)
    whole, rest = divmod(chunk.stop, block_size)
    if first and chunk.tokens:
        tokens = min(block_size - first, chunk.tokens)
        yield first, tokens, 1, index
        index += 1
    if index < whole:
        # Blocks of one token are many: where adjacent ones end is found for all at once.
        blocks = np.asarray(block_table[index:whole], np.int64)
        cuts = np.flatnonzero(np.diff(blocks) != 1) + 1
        for start, stop in itertools.pairwise([0, *cuts.tolist(), whole - index]):
            yield 0, block_size, stop - start, index + start
    if rest and chunk.tokens and whole >= index:
        yield 0, rest, 1, whole


def consecutive(numbers: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Consecutive numbers together: the place of the first, its number, and how many they are."""
    for _, run in itertools.groupby(enumerate(numbers), lambda item: item[1] - item[0]):
        first, *rest = run
        yield *first, 1 + len(rest)
