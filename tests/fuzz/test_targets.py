"""The targets of fuzzing on their seeds, on what fuzzing has found, and on seeds cut, doubled and changed at random.

This runs everywhere and for a second each; `make fuzz` goes on from here for as long as one likes.
"""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path

import pytest
from seeds import SEEDS
from targets import TARGETS

FOUND = Path(__file__).with_name("found")
MEGABYTES = 16
"""More than any target needs for inputs of a few kilobytes."""


def test_every_target_has_seeds() -> None:
    assert set(SEEDS) == set(TARGETS)


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_findings(name: str) -> None:
    for data in [*SEEDS[name], *(path.read_bytes() for path in sorted(FOUND.glob(f"{name}-*")))]:
        TARGETS[name](data)


@pytest.mark.parametrize("name", TARGETS)
def test_changed_seeds(name: str) -> None:
    chance = random.Random(name)
    for _ in range(300):
        TARGETS[name](changed(chance.choice(SEEDS[name]), chance, SEEDS[name]))


@pytest.mark.parametrize("name", TARGETS)
def test_memory_is_bounded(name: str) -> None:
    """Lengths and counts in a message are claims; nothing is reserved because of them."""
    chance = random.Random(name)
    inputs = [changed(seed, chance, SEEDS[name]) for seed in SEEDS[name] for _ in range(5)]
    inputs += [seed.replace(b"\0\0", b"\xff\xff") for seed in SEEDS[name]]
    tracemalloc.start()
    try:
        for data in inputs:
            TARGETS[name](data)
        assert tracemalloc.get_traced_memory()[1] < MEGABYTES << 20
    finally:
        tracemalloc.stop()


def changed(data: bytes, chance: random.Random, others: list[bytes]) -> bytes:
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        at = chance.randrange(len(out) + 1)
        kind = chance.randrange(6)
        if kind == 0:
            del out[at : at + chance.choice((1, 2, 8, 1000))]
        elif kind == 1:
            out[at:at] = out[at : at + chance.choice((1, 8, 64))] * chance.choice((1, 2, 100))
        elif kind == 2:
            out[at:at] = chance.randbytes(chance.choice((1, 2, 4, 8)))
        elif kind == 3:
            other = chance.choice(others)
            start = chance.randrange(len(other) + 1)
            out[at:at] = other[start : start + 64]
        elif at < len(out):
            out[at] = chance.choice((out[at] ^ 1 << chance.randrange(8), 0, 0x7F, 0x80, 0xFF, ord("("), ord("[")))
    return bytes(out[: 64 << 10])
