"""Compiled loops, numpy's and torch's, for every layout of the catalogue, at sizes that lines of memory fit into."""

from __future__ import annotations

import sys
from functools import partial

import numpy as np
import pytest
import relayout_check
from hypothesis import given
from hypothesis import strategies as st
from numba.core.errors import NumbaError
from random_layouts import layouts, tables
from relayout_check import cases, guarded, intact

from deeplink.errors import ConfigError
from deeplink.kvconnector import compiled, convert, device, kernels
from deeplink.kvconnector.catalogue import Entry
from deeplink.kvconnector.layout import ELEMENTS
from deeplink.kvconnector.plan import runs

WAYS = ["numpy", "numba", "numba, streaming"]
CASES = pytest.mark.parametrize(("entry", "dtype"), cases(), ids=lambda value: getattr(value, "name", value))


def check(way: str, monkeypatch: pytest.MonkeyPatch, entry: Entry, dtype: str, shift: int = 0, wide: int = 0) -> None:
    monkeypatch.setattr(kernels, "STREAMED", 0 if way == "numba, streaming" else 1 << 40)
    by = "numpy" if way == "numpy" else "numba"
    relayout_check.check(entry, dtype, partial(convert.gather, by=by), partial(convert.scatter, by=by), shift, wide)


@CASES
@pytest.mark.parametrize("way", WAYS)
def test_every_layout(monkeypatch: pytest.MonkeyPatch, way: str, entry: Entry, dtype: str) -> None:
    check(way, monkeypatch, entry, dtype)


@CASES
@pytest.mark.parametrize("shift", [32, 0])
def test_memory_that_is_not_aligned(monkeypatch: pytest.MonkeyPatch, entry: Entry, dtype: str, shift: int) -> None:
    """Not to lines, and not even to vectors."""
    check("numba, streaming", monkeypatch, entry, dtype, shift or ELEMENTS[dtype])


@pytest.mark.parametrize("wide", [32, 96, 5])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("entry", "dtype"),
    [case for case in cases() if case[0].layout.startswith("block")],
    ids=lambda value: getattr(value, "name", value),
)
def test_blocks_further_apart(monkeypatch: pytest.MonkeyPatch, way: str, entry: Entry, dtype: str, wide: int) -> None:
    check(way, monkeypatch, entry, dtype, wide=wide)


@given(st.data(), st.sampled_from([0, 1 << 40]), st.sampled_from([1, 2, 4]))
def test_random_layouts_leave_the_rest_alone(data: st.DataObject, streamed: int, itemsize: int) -> None:
    """All three ways do the same, and stay inside."""
    sized = data.draw(layouts(dim=data.draw(st.sampled_from([1, 6, 16, 32, 64]))))
    table, chunk = data.draw(tables(sized))
    bound, where = sized.bind(), list(runs(table, sized.block_size, chunk))
    shift = data.draw(st.sampled_from([0, itemsize, 32]))
    results = []
    for by in ("numpy", "numba"):
        made = [guarded(n, itemsize, shift, seed) for seed, n in enumerate(sized.tensors * 2)]
        caches = [cache for cache, _ in made]
        shape = convert.wire_shape(bound, 2, chunk.tokens)
        flat, memory = guarded(int(np.prod(shape)), itemsize, shift, 9)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "STREAMED", streamed)
            wire = flat.reshape(shape)
            convert.gather(caches, bound, where, wire, by=by)
            gathered = flat.tobytes()
            convert.scatter(~wire, bound, where, caches, by=by)
        assert all(intact(*each) for each in [(flat, memory), *made])
        results.append((gathered, [cache.tobytes() for cache in caches]))
    assert results[0] == results[1]


@CASES
@pytest.mark.parametrize("host", [("cpu",), ()])
def test_torch(monkeypatch: pytest.MonkeyPatch, entry: Entry, dtype: str, host: tuple[str, ...]) -> None:
    """Where torch is at hand; tests/engines runs the same in an engine's Python, where it always is."""
    pytest.importorskip("torch")
    monkeypatch.setattr(device, "HOST", host)
    relayout_check.check_torch(entry, dtype)


def test_what_is_insisted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(compiled.VARIABLE, raising=False)
    assert compiled.wanted()
    assert not compiled.wanted("numpy")
    monkeypatch.setenv(compiled.VARIABLE, "numpy")
    assert not compiled.wanted()
    assert compiled.wanted("numba")
    monkeypatch.setenv(compiled.VARIABLE, "fast")
    with pytest.raises(ConfigError):
        compiled.wanted()


def test_warm() -> None:
    assert compiled.warm("numpy") == 0
    assert compiled.warm("numba") > 0


def test_without_numba_numpy_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(compiled.VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr(compiled, "_usable", [])
    assert not compiled.wanted()
    assert compiled.warm() == 0
    with pytest.raises(ImportError):
        compiled.wanted("numba")


def test_a_numba_that_cannot_compile_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise NumbaError("no such processor")

    monkeypatch.delenv(compiled.VARIABLE, raising=False)
    monkeypatch.setattr(compiled, "_usable", [])
    monkeypatch.setattr(kernels, "warm", fail)
    with pytest.raises(NumbaError):
        compiled.warm("numba")
    compiled.warm()
    assert not compiled.wanted()
