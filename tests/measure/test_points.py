"""What times of tokens say about steps."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.errors import LocalError
from deeplink.measure import points
from deeplink.measure.streams import Stream


def stream(sent: float, first: float, step: float, count: int) -> Stream:
    return Stream(sent, tuple(first + step * index for index in range(count)), {})


def test_prefill_lasts_until_the_last_prompt_is_done() -> None:
    assert points.prefill([stream(0, 1.0, 0.1, 1), stream(0.1, 1.5, 0.1, 1)]) == pytest.approx(1.5)


def test_only_steps_that_all_take_part_in_count() -> None:
    """While the second prompt was prefilled, the first sequence's steps took long."""
    times = [1.0, 2.0, 3.0, *(3.0 + 0.1 * index for index in range(1, 11))]
    seconds, middle = points.decode([Stream(0, tuple(times), {}), stream(0, 3.0, 0.1, 40)])
    assert seconds == pytest.approx(0.1)
    assert middle == pytest.approx((7 + 5) / 2)


def test_too_few_common_steps_are_no_measurement() -> None:
    with pytest.raises(LocalError, match="decoded together"):
        points.decode([stream(0, 1, 0.1, 10), stream(0, 1.8, 0.1, 10)])


def test_several_tokens_at_a_time_are_as_many_steps() -> None:
    times = [at for at in accumulate([0.4] * 8) for _ in range(2)]
    seconds, _ = points.decode([Stream(0, tuple(times), {})])
    assert seconds == pytest.approx(0.2, rel=0.1)


@given(st.floats(0, 1), st.floats(0, 1e-3), st.lists(st.integers(1, 10_000), min_size=2, max_size=8, unique=True))
def test_a_line_is_found(latency: float, slope: float, sizes: list[int]) -> None:
    found = points.line(sizes, [latency + slope * size for size in sizes])
    assert found == (pytest.approx(latency, abs=1e-6), pytest.approx(slope, abs=1e-6))


def test_a_line_never_falls() -> None:
    latency, slope = points.line([1, 2, 3], [3.0, 2.0, 1.0])
    assert (latency, slope) == (2.0, 0.0)
