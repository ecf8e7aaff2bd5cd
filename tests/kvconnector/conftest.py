from __future__ import annotations

from collections.abc import Iterator

import pytest
from loopback import HND, VEC, Pair, make_side


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(make_side("prefill", VEC, 64, seed=1), make_side("decode", HND, 128, seed=2))
    yield made
    made.producer.endpoint.close()
    made.consumer.endpoint.close()
