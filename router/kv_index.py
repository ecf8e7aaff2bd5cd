"""Which engine holds which beginning of a prompt, as the engines themselves say it. No IO.

Engines name their blocks by hashes of their own, which differ from engine to engine and from start to start. Here a
block is named by a hash of its tokens and all before it, so one prompt is looked up in all engines at once: for every
block there is a set of engines, as the bits of a number.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence

import xxhash

from deeplink.router.kv_events import Cleared, Event, Hash, Removed, Stored

MAX_BLOCKS = 1 << 20
"""Of one engine. Past it the engine is not followed any more: it would be a guess anyway."""
_SEED = 0x6B76


def chain(tokens: Sequence[int], size: int, seed: int = _SEED) -> tuple[int, ...]:
    """The names of the whole blocks of `size` tokens. What follows a block goes on from its name as `seed`."""
    data = array("I", tokens)
    if sys.byteorder == "big":
        data.byteswap()
    raw, step = memoryview(data).cast("B"), size * data.itemsize
    found = []
    for start in range(0, len(raw) - step + 1, step):
        seed = xxhash.xxh3_64_intdigest(raw[start : start + step], seed)
        found.append(seed)
    return tuple(found)


class Cached:
    """What one engine has said it holds: its own names of blocks, and ours. None is a block that belongs to prompts we
    cannot tell from others by their tokens."""

    __slots__ = ("bit", "names", "size", "why")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.names: dict[Hash, int | None] = {}
        self.size = 0
        self.why = "nothing has been heard of it yet"


class Index:
    """The blocks of all engines. `why` of an engine says why it is not exact; "" if it is."""

    def __init__(self) -> None:
        self._engines: dict[str, Cached] = {}
        self._holders: dict[int, int] = {}
        self._free: list[int] = []

    def why(self, name: str) -> str:
        engine = self._engines.get(name)
        return engine.why if engine is not None else "it publishes no cache events"

    @property
    def sizes(self) -> set[int]:
        """The block sizes that prompts are looked up by."""
        return {engine.size for engine in self._engines.values() if engine.size}

    @property
    def names(self) -> list[str]:
        return list(self._engines)

    def follow(self, name: str) -> None:
        """Events of this engine will come."""
        if name not in self._engines:
            bit = self._free.pop() if self._free else len(self._engines)
            self._engines[name] = Cached(1 << bit)

    def begin(self, name: str) -> None:
        """The engine's cache is empty, and all that happens to it from now on will be told: exact."""
        self.doubt(name, "")

    def doubt(self, name: str, why: str) -> None:
        """What it holds is not known, or not known any more: forgets all of it."""
        engine = self._engines.get(name)
        if engine is None:
            return
        for ours in engine.names.values():
            self._drop(engine, ours)
        engine.names.clear()
        engine.why = why

    def leave(self, name: str) -> None:
        self.doubt(name, "it is gone")
        engine = self._engines.pop(name, None)
        if engine is not None:
            self._free.append(engine.bit.bit_length() - 1)

    def apply(self, name: str, events: Iterable[Event]) -> None:
        """In their order. An event that does not fit to what was told before makes the engine doubtful."""
        engine = self._engines.get(name)
        if engine is None:
            return
        for event in events:
            if isinstance(event, Stored):
                self._store(name, engine, event)
            elif isinstance(event, Removed):
                for block in event.blocks:
                    self._drop(engine, engine.names.pop(block, None))
            elif isinstance(event, Cleared):
                self.begin(name)

    def held(self, chains: dict[int, tuple[int, ...]]) -> dict[str, int]:
        """How many tokens of a prompt's beginning each engine holds; `chains` has the prompt's by block size."""
        found: dict[str, int] = {}
        for size, names in chains.items():
            mine = {engine.bit: name for name, engine in self._engines.items() if engine.size == size}
            left = 0
            for bit in mine:
                left |= bit
            holders, place = self._holders, 0
            for block in names:
                there = holders.get(block, 0)
                gone = left & ~there
                if gone:
                    for bit, name in mine.items():
                        if gone & bit:
                            found[name] = place * size
                    left &= there
                    if not left:
                        break
                place += 1
            for bit, name in mine.items():
                if left & bit:
                    found[name] = place * size
        return found

    def _store(self, name: str, engine: Cached, event: Stored) -> None:
        if engine.size not in (0, event.size):
            self.doubt(name, f"its blocks have {event.size} tokens and {engine.size}")
        engine.size = event.size
        if len(engine.names) + len(event.blocks) > MAX_BLOCKS:
            self.doubt(name, f"it holds more than {MAX_BLOCKS} blocks")
            return
        before: int | None = _SEED
        if event.parent is not None:
            if event.parent not in engine.names:
                # Stored before we listened, or lost: where these blocks belong cannot be known.
                engine.why = engine.why or "it stored blocks after one that was never told"
                return
            before = engine.names[event.parent]
        if event.keyed or before is None:
            engine.names.update(dict.fromkeys(event.blocks))
            return
        for block, ours in zip(event.blocks, chain(event.tokens, event.size, before), strict=True):
            if block in engine.names:
                self._drop(engine, engine.names[block])
            engine.names[block] = ours
            self._holders[ours] = self._holders.get(ours, 0) | engine.bit

    def _drop(self, engine: Cached, ours: int | None) -> None:
        if ours is None:
            return
        left = self._holders.get(ours, 0) & ~engine.bit
        if left:
            self._holders[ours] = left
        else:
            self._holders.pop(ours, None)
