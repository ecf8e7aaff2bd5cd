"""Two codings together tell every element of a chunk from every other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.kvconnector.proof import byte_codings, codings


@given(
    st.integers(1, 8), st.integers(1, 48), st.sampled_from([32, 64, 80, 128]), st.sampled_from([np.uint16, np.uint32])
)
def test_every_element_has_a_code_of_its_own(heads: int, tokens: int, dim: int, dtype: type) -> None:
    by_token, by_rest = codings(heads, tokens, dim, np.dtype(dtype))
    assert by_token.shape == by_rest.shape == (2, heads, tokens, dim)
    pairs = by_token.astype(np.uint64).reshape(-1) << np.uint64(32) | by_rest.reshape(-1)
    assert np.unique(pairs).size == pairs.size


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_codes_are_numbers_in_every_type(dtype: type) -> None:
    """So no engine's operation has a reason to change them: finite, normal, and not zero."""
    for code in codings(8, 64, 128, np.dtype(dtype)):
        upper = np.unique(code >> np.asarray(8 * (code.itemsize - 2), code.dtype)).astype(np.uint16)
        half = upper.view(np.float16)
        single = (upper.astype(np.uint32) << np.uint32(16)).view(np.float32)
        for values, info in ((half, np.finfo(np.float16)), (single, np.finfo(np.float32))):
            assert np.isfinite(values).all()
            assert (np.abs(values) >= info.tiny).all()


@given(st.integers(1, 8), st.integers(1, 48), st.sampled_from([32, 64, 80, 128]), st.sampled_from([120, 238, 240]))
def test_every_element_of_one_byte_has_codes_of_its_own(heads: int, tokens: int, dim: int, count: int) -> None:
    """In as many codings as it takes; and never the code of what was not written, which is not among those given."""
    codes = np.arange(1, count + 1).astype(np.uint8)
    found = byte_codings(heads, tokens, dim, codes)
    assert all(code.shape == (2, heads, tokens, dim) and code.min() > 0 for code in found)
    together = np.stack([code.reshape(-1) for code in found])
    assert np.unique(together, axis=1).shape[1] == 2 * heads * tokens * dim
