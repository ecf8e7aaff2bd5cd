"""The exact core equals trying everything, on random problems and on the corners."""

from __future__ import annotations

import cases
import pytest

BLOCKS, EACH = 20, 12


@pytest.mark.parametrize("block", range(BLOCKS))
def test_equal_to_trying_everything(block: int) -> None:
    for seed in range(block * EACH, (block + 1) * EACH):
        assert cases.equal(seed), seed
