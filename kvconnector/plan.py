"""What to move: which tokens travel together, and where they lie in each side's blocks.

A handoff moves the KV of tokens ``[start, stop)`` of one prompt. It is cut into chunks that staging can hold; each
chunk is gathered from the producer's blocks and scattered into the consumer's, and both are lists of runs. Every
token of the range is in exactly one chunk, and in exactly one run of that chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
    token = chunk.start
    while token < chunk.stop:
        index, first = divmod(token, block_size)
        tokens = min(block_size - first, chunk.stop - token)
        count = 1
        if tokens == block_size:
            whole = (chunk.stop - token) // block_size
            while count < whole and block_table[index + count] == block_table[index] + count:
                count += 1
        yield Run(block_table[index], count, first, tokens, token - origin)
        token += tokens * count
