"""What is pushed by one-sided libraries, without one."""

from __future__ import annotations

import numpy as np
import pytest

from deeplink.bench import libraries

SIZE = 64 << 20


@pytest.mark.parametrize("name", libraries.CASES)
def test_every_byte_is_pushed_once(name: str) -> None:
    pushes = libraries.pushes_of(libraries.CASES[name], SIZE)
    pieces = np.concatenate(pushes).astype(np.int64)
    for column in (0, 1):
        order = pieces[np.argsort(pieces[:, column])]
        np.testing.assert_array_equal(order[:, column], np.cumsum(order[:, 2]) - order[:, 2])
    assert pieces[:, 2].sum() == SIZE
    assert len(pushes) == (8 if libraries.CASES[name].chunked else 1)
