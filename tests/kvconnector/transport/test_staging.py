"""Staging memory: bounded, never given to two, all of it back in the end."""

from __future__ import annotations

import itertools
import random
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sockets import InThread, soon

from deeplink.errors import DeadlineExceeded, HandoffError
from deeplink.kvconnector.transport.staging import ALIGN, Piece, Staging


@given(st.integers(1, 4000), st.lists(st.tuples(st.booleans(), st.integers(0, 1500), st.integers(0)), max_size=60))
def test_pieces_never_overlap_and_all_comes_back(capacity: int, steps: list[tuple[bool, int, int]]) -> None:
    staging = Staging(capacity)
    held: list[tuple[Piece, int]] = []
    for step, (release, length, choice) in enumerate(steps):
        if release and held:
            piece, mark = held.pop(choice % len(held))
            assert set(staging.view(piece)) <= {mark}  # nobody else wrote there
            staging.release(piece)
        elif -(-length // ALIGN) * ALIGN <= capacity and (piece := staging.try_allocate(length)) is not None:
            mark = step % 251 + 1
            staging.view(piece)[:] = bytes([mark]) * length
            held.append((piece, mark))
        extents = sorted((piece.offset, piece.offset + piece.extent) for piece, _ in held if piece.extent)
        assert all(a_stop <= b_start for (_, a_stop), (b_start, _) in itertools.pairwise(extents))
        assert all(start >= 0 and stop <= capacity for start, stop in extents)
        assert staging.used == sum(stop - start for start, stop in extents)
    for piece, mark in held:
        assert set(staging.view(piece)) <= {mark}
        staging.release(piece)
    assert staging.used == 0
    whole = staging.try_allocate(capacity // ALIGN * ALIGN)  # in one piece again
    assert whole is not None


def test_an_array_is_the_piece() -> None:
    staging = Staging(1 << 12)
    staging.try_allocate(100)
    piece = staging.try_allocate(48)
    assert piece is not None
    array = staging.array(piece, np.dtype(np.uint16), (2, 3, 4))
    array[:] = np.arange(24).reshape(2, 3, 4)
    assert bytes(staging.view(piece)) == np.arange(24, dtype=np.uint16).tobytes()
    assert array.ctypes.data % ALIGN == 0


def test_released_twice() -> None:
    staging = Staging(1 << 12)
    piece = staging.try_allocate(100)
    assert piece is not None
    staging.release(piece)
    with pytest.raises(KeyError):
        staging.release(piece)


def test_released_twice_after_its_place_has_a_new_owner() -> None:
    staging = Staging(1 << 12)
    old = staging.try_allocate(100)
    assert old is not None
    staging.release(old)
    new = staging.try_allocate(100)
    assert new is not None
    assert (new.offset, new.length) == (old.offset, old.length)
    with pytest.raises(KeyError):
        staging.release(old)
    assert staging.used == new.extent


@pytest.mark.parametrize("length", [257, 1 << 40])
def test_what_can_never_fit_is_refused_at_once(length: int) -> None:
    staging = Staging(256)
    for attempt in (staging.try_allocate, lambda n: staging.allocate(n, soon(60))):
        with pytest.raises(HandoffError) as caught:
            attempt(length)
        assert (caught.value.field, caught.value.ours) == ("kv.staging", "256")
        assert "kv.chunk" in caught.value.remedy


def test_the_deadline() -> None:
    staging = Staging(256)
    assert staging.try_allocate(200) is not None
    assert staging.try_allocate(100) is None
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded) as caught:
        staging.allocate(100, soon(0.2))
    assert caught.value.field == "kv.staging"
    assert time.monotonic() - began >= 0.2
    with pytest.raises(DeadlineExceeded):
        staging.allocate(100, time.monotonic() - 1)


def test_a_release_wakes_who_waits() -> None:
    staging = Staging(256)
    first = staging.try_allocate(256)
    assert first is not None
    waiting = InThread(lambda: staging.allocate(256, soon(30)))
    time.sleep(0.05)
    assert not waiting.done
    staging.release(first)
    second = waiting.join()
    assert isinstance(second, Piece)
    staging.release(second)
    assert staging.used == 0


def test_many_threads() -> None:
    staging = Staging(1 << 12)
    barrier = threading.Barrier(8)

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        barrier.wait(10)
        for _ in range(60):
            length = int(rng.integers(1, 2000))
            piece = staging.allocate(length, soon(30))
            view = staging.view(piece)
            view[:] = bytes([seed]) * length
            time.sleep(0)
            assert set(view) == {seed}
            staging.release(piece)

    for thread in [InThread(lambda seed=seed: work(seed)) for seed in range(1, 9)]:  # type: ignore[misc]
        thread.join(40)
    assert staging.used == 0


@given(st.lists(st.tuples(st.integers(1, 700), st.sampled_from([0, 256, 300])), max_size=40), st.randoms())
def test_the_first_bytes_can_be_kept_free(wanted: list[tuple[int, int]], dice: random.Random) -> None:
    """Pieces never overlap, none that is to lie above lies below, and what they leave is one hole in the end."""
    staging, held = Staging(2048), list[Piece]()
    for length, above in wanted:
        if held and dice.random() < 0.4:
            staging.release(held.pop(dice.randrange(len(held))))
        piece = staging.try_allocate(length, above)
        if piece is not None:
            assert piece.offset >= above
            held.append(piece)
            places = sorted((one.offset, one.offset + one.extent) for one in held)
            assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(places))
    for piece in held:
        staging.release(piece)
    assert staging.used == 0
    assert staging.try_allocate(2048) is not None
