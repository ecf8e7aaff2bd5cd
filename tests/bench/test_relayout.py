"""The caches that re-layout is measured on are what they are said to be."""

from __future__ import annotations

import pytest

from deeplink.bench import packings, relayout


def test_what_we_pack_for_amx_is_what_the_layout_says() -> None:
    """`prepared` compares what is gathered with what was packed, which is done without the layout."""
    size = packings.Size(2, 2, 32, 3, 64)
    wire = packings.values(size)
    cache = packings.amx(wire, size, [2, 0, 1])
    # K of token 17, dim 5 and V of token 33, dim 18, of layer 1, head 1, each where AMX's tiles have them.
    block, head = cache[1].reshape(3, 2, -1)[2][1], wire[1, :, 1]
    assert block[1 * 16 * 32 + 2 * 32 + 1 * 2 + 1] == head[0, 17, 5]
    assert block[64 * 32 + 1 * 64 * 16 + 16 * 32 + 2 * 2 + 1] == head[1, 33, 18]


@pytest.mark.parametrize("name", [name for name, case in relayout.CASES.items() if not case.written])
def test_a_cache_covers_all_tokens(name: str) -> None:
    case = relayout.CASES[name]
    cache, table, _ = relayout.prepared(case, 256)
    assert sorted(table) == list(range(256 // case.block))
    assert cache.wire_shape(256)[2] == case.heads


def test_a_packing_that_vllm_does_not_write_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packings, "values", lambda size: (_ for _ in ()).throw(packings.Unavailable("no vLLM")))
    relayout._written.cache_clear()
    (row,) = relayout.measure(["digest_cpu_vec"], relayout.Scale(1, 256, 256))
    assert row.as_json() == {"name": "digest_cpu_vec", "reason": "no vLLM"}


def test_without_torch_the_mark_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    assert relayout.marked()[0] == "numpy copyto"
