"""The replay of `benchmarks/closed_loop.py` against what can be said without it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")
COSTS = (0.01, 0.0, 0.0, 1e-4, 0.0)


@pytest.fixture(scope="module")
def closed_loop() -> Any:
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("closed_loop")


def engine(loop: Any, **changed: Any) -> Any:
    usual = loop.Engine(
        policy=0, room=1e9, reserved=1.0, budget=8192.0, chunked=True, wait_tokens=0.0, wait_steps=0, shown=0.0
    )
    return usual._replace(**changed)


def run(loop: Any, together: int, requests: int, prompt: int, output: int, spread: float = 0.0, **changed: Any) -> Any:
    load = loop.Load(together, requests, prompt, output, spread)
    asked, first, end, tokens = loop.replay(load, engine(loop, **changed), loop.Costs(*COSTS))
    return first - asked, end - first, tokens


def test_one_request_at_a_time_takes_a_prefill_and_its_steps(closed_loop: Any) -> None:
    first, further, tokens = run(closed_loop, 1, 5, 1000, 11)
    assert tokens.tolist() == [11] * 5
    np.testing.assert_allclose(first, closed_loop.CLIENT + 0.01 + 1000e-4)
    np.testing.assert_allclose(further, 10 * 0.01)


def test_every_request_is_answered_whatever_its_length(closed_loop: Any) -> None:
    first, further, tokens = run(closed_loop, 16, 160, 3000, 50, 0.5, room=20_000.0)
    assert (first > 0).all()
    assert (further > 0).all()
    assert 25 <= tokens.min() <= tokens.max() <= 50


@pytest.mark.parametrize("chunked", [True, False])
def test_a_prompt_longer_than_a_step_is_cut_or_alone(closed_loop: Any, chunked: bool) -> None:
    first, _, _ = run(closed_loop, 1, 1, 5000, 4, budget=2000.0, chunked=chunked)
    steps = 3 if chunked else 1
    np.testing.assert_allclose(first, closed_loop.CLIENT + steps * 0.01 + 5000e-4)


def test_prompts_before_tokens_keep_a_crowd_together(closed_loop: Any) -> None:
    """All of one length: nobody goes on before the last has begun, so all end and ask again at once, and the last of
    each round waits for the prefill of all."""
    first, further, _ = run(closed_loop, 8, 80, 1000, 100, policy=1, budget=1000.0)
    assert first[40:].max() == pytest.approx(8 * (0.01 + 1000e-4), rel=0.05)
    mixed, slower, _ = run(closed_loop, 8, 80, 1000, 100, budget=1008.0)
    assert mixed[40:].mean() < first[40:].mean()
    assert slower[40:].mean() > further[40:].mean()


def test_who_finds_no_room_waits_for_an_answer(closed_loop: Any) -> None:
    first, further, _ = run(closed_loop, 4, 4, 100, 10, room=220.0, policy=1)
    assert first[:2].max() < further[:2].min() < first[2:].min()


def test_prompts_are_held_back_until_there_are_enough(closed_loop: Any) -> None:
    free, _, _ = run(closed_loop, 4, 40, 100, 60, 0.5)
    held, _, _ = run(closed_loop, 4, 40, 100, 60, 0.5, wait_tokens=500.0, wait_steps=20)
    assert 15 * 0.01 < held[4:].mean() - free[4:].mean() < 22 * 0.01


def test_tokens_that_are_told_slowly_are_seen_late(closed_loop: Any) -> None:
    """One at a time, whatever the engine does meanwhile: so many tokens in all take so long."""
    first, further, _ = run(closed_loop, 8, 80, 100, 50, shown=0.01)
    np.testing.assert_allclose((first + further)[8:].mean(), 8 * 50 * 0.01, rtol=0.1)
