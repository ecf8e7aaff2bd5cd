"""The storage backend of SGLang's hierarchical cache, without SGLang: what it refuses, and what it does with pages."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import stand_in

from deeplink.errors import ConfigError
from deeplink.kvconnector.caches.cache import Cache
from deeplink.kvconnector.contracts.contract import Model
from deeplink.kvconnector.layouts.layout import Layout
from deeplink.kvconnector.prefixes.names import pages
from deeplink.kvconnector.prefixes.pages import Pages
from deeplink.kvconnector.prefixes.space import Space
from deeplink.kvconnector.prefixes.store import Store

stand_in.install()

from sglang_deeplink import hicache, naming  # noqa: E402

SETTINGS = {
    "backend_name": "deeplink",
    "module_path": "sglang_deeplink.hicache",
    "class_name": "DeepLinkHiCache",
    "interface_v1": 1,
    "path": "/nowhere",
}
SERVER = {
    "tp_size": 1,
    "pp_size": 1,
    "dp_size": 1,
    "page_size": 16,
    "disaggregation_mode": "null",
    "hicache_host_memory_mode": "cache",
    "enable_lora": False,
    "speculative_algorithm": None,
    "load_format": "auto",
    "json_model_override_args": "{}",
    "torchao_config": "",
}
UNIT, PAGE, BLOCKS = 4, 8, 6
SPACE = Space(Model("LlamaForCausalLM", 1, 1000, "{}", "none", "w1"), (0,), 2, 2, 4, "float16", UNIT)


class Slots:
    """A tensor of slots, with as much of a tensor as is used of it."""

    def __init__(self, *of_blocks: int) -> None:
        self.array = (np.array(of_blocks)[:, None] * PAGE + np.arange(PAGE)).reshape(-1)

    def cpu(self) -> Slots:
        return self

    def numpy(self) -> np.ndarray[Any, Any]:
        return self.array


@pytest.fixture(autouse=True)
def _python_tree(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(naming, "_tree", naming.PYTHON_TREE)
    yield
    hicache._active = None
    naming.use(0)


def backend(monkeypatch: pytest.MonkeyPatch, settings: dict[str, object] | None = None, **server: object) -> Any:
    monkeypatch.setattr(hicache, "get_server_args", lambda: SimpleNamespace(**{**SERVER, **server}))
    return hicache.DeepLinkHiCache(SimpleNamespace(extra_config={**SETTINGS, **(settings or {})}), {})


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """One with a pool of its own and a store, as it is once SGLang has named its pools."""
    made = backend(monkeypatch, {"unit": UNIT}, page_size=PAGE)
    bound = Layout.parse("kv | slot head dim").bind(heads=2, head_dim=4, block_size=PAGE, blocks=BLOCKS)
    draws = np.random.default_rng(1)
    arrays = tuple(draws.integers(0, 1 << 16, bound.elements(side)).astype(np.uint16) for side in range(2))
    made._pages = Pages(Cache(arrays, bound), Store(tmp_path / "store", 1 << 20, SPACE))
    made.mem_pool_host = SimpleNamespace(page_size=PAGE)
    made.registered_pools = {"kv": None}
    made.on_host_pools_registered()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"interface_v1": 0}, "interface_v1"),
        ({"gib": 0}, "gib"),
        ({"unit": 0}, "unit"),
        ({"unit": 32}, "unit"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_settings_that_are_wrong_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, object], field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        backend(monkeypatch, change)
    assert caught.value.field == field


def test_settings_that_are_not_there_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(SETTINGS, "path")
    with pytest.raises(ConfigError) as caught:
        backend(monkeypatch)
    assert caught.value.field == "path"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tp_size", 2),
        ("pp_size", 2),
        ("dp_size", 2),
        ("disaggregation_mode", "prefill"),
        ("hicache_host_memory_mode", "buffer_only"),
        ("enable_lora", True),
        ("speculative_algorithm", "EAGLE"),
        ("enable_unified_memory", True),
        ("load_format", "dummy"),
        ("json_model_override_args", '{"sliding_window": 8}'),
        ("torchao_config", "int8wo"),
    ],
)
def test_what_was_not_proven_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        backend(monkeypatch, **{field: value})
    assert caught.value.field == field.replace("_", "-")


@pytest.mark.parametrize("tree", ["rust", ""])
def test_another_tree_of_prefixes_is_refused(monkeypatch: pytest.MonkeyPatch, tree: str) -> None:
    monkeypatch.setattr(naming, "_tree", tree)
    with pytest.raises(ConfigError) as caught:
        backend(monkeypatch)
    assert caught.value.field == "hicache-storage-backend"


def test_other_pools_than_that_of_kv_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = backend(monkeypatch)
    made.registered_pools = {"kv": None, "swa": None}
    with pytest.raises(ConfigError) as caught:
        made.on_host_pools_registered()
    assert caught.value.field == "host pools"


def test_pages_go_to_the_store_and_come_back(opened: Any) -> None:
    names = naming.hashes(lambda *_: None, list(range(3 * PAGE)), None, PAGE)
    assert names == pages(range(3 * PAGE), PAGE, UNIT)
    assert opened.batch_exists(names) == 0
    assert opened.batch_set_v1(names[:2], Slots(4, 1)) == [True, True]
    assert opened.batch_exists(names) == 2
    before = opened._pages.digest(names[:2], [4, 1])
    assert opened.batch_get_v1(names, Slots(0, 3, 5)) == [True, True, False]
    assert opened._pages.digest(names[:2], [0, 3]) == before
    assert opened.counts().hits == 4
    assert opened.exists(names[1])
    opened.clear()
    assert opened.batch_exists(names) == 0


@pytest.mark.parametrize("wrong", [slice(1, None), slice(None, None, -1)])
def test_slots_that_are_not_whole_pages_are_refused(opened: Any, wrong: slice) -> None:
    slots = Slots(4, 1)
    slots.array = slots.array[wrong]
    with pytest.raises(ConfigError):
        opened.batch_set_v1(pages(range(2 * PAGE), PAGE, UNIT), slots)


def test_other_weights_end_it(opened: Any, caplog: pytest.LogCaptureFixture) -> None:
    names = pages(range(2 * PAGE), PAGE, UNIT)
    opened.batch_set_v1(names[:1], Slots(0))
    with caplog.at_level(logging.WARNING):
        hicache.weights_changed()
        hicache.weights_changed()
    assert caplog.text.count("model.weights") == 1
    assert opened.batch_exists(names) == 0
    assert opened.batch_get_v1(names[:1], Slots(1)) == [False]
    assert opened.batch_set_v1(names[1:], Slots(2)) == [False]
    assert opened.counts().written == 2


def test_a_closed_backend_gives_sglang_its_names_back(opened: Any) -> None:
    opened.close()
    assert naming.hashes(lambda *_: "own", [1], None, 1) == "own"
    hicache.weights_changed()
