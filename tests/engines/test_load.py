"""The run of `load` between two engines of vLLM."""

from __future__ import annotations

import load
import pytest
from fleet import Pair


@pytest.mark.long
def test_two_hundred_requests(pair: Pair) -> None:
    found = load.run(pair.fleet, pair.prefill, pair.decode, pair.decode, pair.router)
    assert not found.wrong
    assert sum(found.ends.values()) == load.REQUESTS
    assert found.ends["left"] > 0.1 * load.REQUESTS, found.ends
    assert found.ends["answered"] > 0.6 * load.REQUESTS, found.ends
