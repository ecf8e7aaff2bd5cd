"""The run of `load` between two engines of vLLM."""

from __future__ import annotations

import load
import pytest
from fleet import Pair


@pytest.mark.long
def test_two_hundred_requests(pair: Pair) -> None:
    ends, wrong = load.run(pair.fleet, pair.prefill, pair.decode, pair.decode, pair.router)
    assert not wrong
    assert ends.total() == load.REQUESTS
    assert ends["left"] > 0.1 * load.REQUESTS, ends
    assert ends["answered"] > 0.6 * load.REQUESTS, ends
