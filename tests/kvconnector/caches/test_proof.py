"""A layout that is the engine's is proven, and any other is refused, by what the engine's own operation writes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.errors import LayoutError
from deeplink.kvconnector.caches.cache import Cache
from deeplink.kvconnector.caches.proof import byte_codings, codings, prove
from deeplink.kvconnector.layouts.catalogue import LAYOUTS
from deeplink.kvconnector.layouts.layout import Bound, Layout
from deeplink.kvconnector.relayout.plan import Chunk

SIZES = {"heads": 4, "head_dim": 64, "block_size": 32, "blocks": 6}


def bound(layout: str) -> Bound:
    return Layout.parse(layout).bind(**SIZES)


PAIRS = [name for name, layout in LAYOUTS.items() if "head" in layout and bound(layout).kv == 2]
"""Those with K and V of several heads."""


class Engine:
    """A cache of two layers whose own operation writes in `real`, whatever layout is declared for it."""

    def __init__(self, declared: Bound, real: Bound, dtype: type = np.uint16) -> None:
        tensors = range(declared.tensors)
        size = max(made.elements(place) for made in (declared, real) for place in tensors)
        size = max(size, declared.blocks * declared.block_elements // declared.tensors)
        arrays = tuple(np.full(size, 7, dtype) for _ in range(2 * declared.tensors))
        self.cache = Cache(arrays, declared)
        self._real = Cache(arrays, real)

    def write(self, layer: int, key: npt.NDArray[Any], value: npt.NDArray[Any], slots: npt.NDArray[np.int64]) -> None:
        table = (slots[::32] // 32).tolist()
        wire_LSHTD = np.ascontiguousarray(np.stack([key, value]).transpose(0, 2, 1, 3)).view(self.cache.dtype)[None]
        self._real.part([layer], (0, 4)).scatter(wire_LSHTD, 0, table, Chunk(0, slots.size))


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_the_layout_that_is_written_is_proven(name: str, dtype: type) -> None:
    declared = bound(LAYOUTS[name])
    engine = Engine(declared, declared, dtype)
    prove(engine.cache, engine.write, ["first", "second"])
    for array in engine.cache.layers:
        assert not array[: declared.block_elements // declared.tensors].any()


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


@pytest.mark.parametrize("declared", PAIRS)
def test_any_other_layout_is_refused(declared: str) -> None:
    """Of as many tensors, as an engine's tensors are counted first."""
    ours = bound(LAYOUTS[declared])
    for name in PAIRS:
        real = bound(LAYOUTS[name])
        if real.sides == ours.sides or real.tensors != ours.tensors:
            continue
        engine = Engine(ours, real)
        with pytest.raises(LayoutError, match="first does not have the layout"):
            prove(engine.cache, engine.write, ["first", "second"])


@pytest.mark.parametrize("fault", ["token", "block", "kv", "beside", "second layer"])
def test_one_element_in_the_wrong_place_is_refused(fault: str) -> None:
    declared = bound(LAYOUTS["vllm-nhd"])
    engine = Engine(declared, declared)

    def write(layer: int, key: npt.NDArray[Any], value: npt.NDArray[Any], slots: npt.NDArray[np.int64]) -> None:
        if fault == "kv":
            key, value = value, key
        if fault == "block":
            slots = slots[::-1].reshape(2, 32)[:, ::-1].reshape(-1)
        if fault == "token":
            key = np.concatenate([key[:5], key[6:7], key[5:6], key[7:]])
        engine.write(layer, key, value, slots)
        if fault == "beside":  # to a block that is not one of those that are written
            engine.cache.layers[layer][2 * declared.block_elements + 3] = 1
        if fault == "second layer" and layer == 1:
            engine.cache.layers[1][declared.block_elements] ^= 1

    with pytest.raises(LayoutError) as caught:
        prove(engine.cache, write, ["first", "second"])
    assert str(caught.value).startswith("second" if fault == "second layer" else "first")
    assert caught.value.field == "layout"


def test_too_few_blocks_prove_nothing() -> None:
    declared = Layout.parse(LAYOUTS["vllm-nhd"]).bind(**{**SIZES, "blocks": 3})
    engine = Engine(declared, declared)
    with pytest.raises(LayoutError, match="fewer than 4"):
        prove(engine.cache, engine.write, ["first", "second"])


@given(st.integers(1, 8), st.integers(1, 48), st.sampled_from([32, 64, 80, 128]), st.sampled_from([120, 238, 240]))
def test_every_element_of_one_byte_has_codes_of_its_own(heads: int, tokens: int, dim: int, count: int) -> None:
    """In as many codings as it takes; and never the code of what was not written, which is not among those given."""
    codes = np.arange(1, count + 1).astype(np.uint8)
    found = byte_codings(heads, tokens, dim, codes)
    assert all(code.shape == (2, heads, tokens, dim) and code.min() > 0 for code in found)
    together = np.stack([code.reshape(-1) for code in found])
    assert np.unique(together, axis=1).shape[1] == 2 * heads * tokens * dim
