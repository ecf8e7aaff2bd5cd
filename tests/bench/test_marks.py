"""The marks do the work that they are said to do."""

from __future__ import annotations

import time

import numpy as np

from deeplink.bench.marks import plain_socket, through_shared
from deeplink.bench.timing import take_turns


def test_every_block_goes_through_the_shared_segment_to_its_place() -> None:
    block, ours, theirs = 3 << 20, [2, 0, 1], [0, 2, 1]
    source = np.random.default_rng(0).integers(0, 256, 3 * block, np.uint8)
    target = np.zeros_like(source)
    through_shared(source, target, block, ours, theirs)()
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(target[b * block : (b + 1) * block], source[a * block : (a + 1) * block])


def test_the_plain_socket_can_be_used_again_and_again() -> None:
    with plain_socket((2 << 20) + 1) as (run, _):
        for _ in range(3):
            run()


def test_the_best_round_counts_and_the_first_does_not() -> None:
    told = {"a": iter([0.1, 3.0, 2.0]), "b": iter([9.0, 5.0, 6.0])}
    best = take_turns({name: lambda name=name: next(told[name]) for name in told}, 2)  # type: ignore[misc]
    assert (best["a"].seconds, best["b"].seconds) == (2.0, 5.0)
    assert best["a"].per_second(4.0) == 2.0


def test_what_returns_nothing_is_timed() -> None:
    best = take_turns({"sleep": lambda: time.sleep(0.01)}, 1)
    assert best["sleep"].seconds >= 0.01
