"""Which engine probably holds the beginning of a prompt: by what it was given lately, not by what it says. No IO.

Prompts are cut into chunks of text, each named by a hash of itself and all before it. For every engine the newest
chunks are kept, as many as its cache has room for. Nothing here knows what the engine has really evicted, so the
result is good for choosing, and for nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

CHUNK = 256
"""Bytes of text."""
CHUNK_TOKENS = CHUNK // 4
MAX_CHUNKS = 2048
"""Of one prompt; what comes after them is not told apart."""
START = 16
"""Chunks that tell where a prompt belongs."""
ROOM = 8192
"""Chunks kept for an engine that does not say how large its cache is."""
MAX_ROOM = 65536


def hashes(text: bytes) -> tuple[int, ...]:
    """The names of the whole chunks of a prompt."""
    seed, found = 0, []
    for start in range(0, min(len(text), MAX_CHUNKS * CHUNK) - CHUNK + 1, CHUNK):
        seed = xxhash.xxh3_64_intdigest(text[start : start + CHUNK], seed)
        found.append(seed)
    return tuple(found)


def start(chain: Sequence[int]) -> int:
    """What stands for how a prompt begins: its first 4 KiB, or all whole chunks of a shorter one; 0 if it has none.

    One chunk would not do: many have no more than that of one system prompt.
    """
    return chain[min(START, len(chain)) - 1] if chain else 0


class Prefixes:
    """The chunks of each engine, in the order of their last use."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[int, None]] = {}
        self._room: dict[str, int] = {}

    def held(self, name: str, chain: Sequence[int]) -> int:
        """How many tokens from the prompt's beginning this engine was given before."""
        kept = self._kept.get(name)
        if not kept:
            return 0
        # Chunks nearer the beginning are always kept longer, so those that are held come first.
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high) // 2
            if chain[middle] in kept:
                low = middle + 1
            else:
                high = middle
        return low * CHUNK_TOKENS

    def add(self, name: str, chain: Sequence[int]) -> None:
        """This engine is given the prompt now."""
        kept = self._kept.setdefault(name, {})
        for chunk in reversed(chain):
            kept.pop(chunk, None)
            kept[chunk] = None
        while len(kept) > self._room.get(name, ROOM):
            del kept[next(iter(kept))]

    def resize(self, name: str, tokens: int) -> None:
        """The engine's cache has room for this many tokens."""
        self._room[name] = min(max(1, tokens // CHUNK_TOKENS), MAX_ROOM)

    def forget(self, name: str) -> None:
        """The engine is gone or was restarted, and its cache with it."""
        self._kept.pop(name, None)
