"""What is refused at start-up, by the name of the setting."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deeplink.errors import ConfigError
from lmdeploy_deeplink.migration import adapter


def engine(**other: Any) -> SimpleNamespace:
    """One that is supported, but for `other`."""
    settings = {"role": SimpleNamespace(name=other.get("role", "Decode")), "tp": 2, "dp": 1, "ep": 1}
    settings |= {"quant_policy": 0, "enable_prefix_caching": False}
    cache = {"block_size": 64, "kernel_block_size": 64, "window_size": -1}
    model = {"num_replicate_key_value_heads": 1}
    for part in (settings, cache, model):
        part |= {name: value for name, value in other.items() if name in part and name != "role"}
    return SimpleNamespace(
        engine_config=SimpleNamespace(**settings),
        cache_config=SimpleNamespace(**cache),
        model_config=SimpleNamespace(**model),
    )


@pytest.mark.parametrize("role", ["Prefill", "Decode"])
@pytest.mark.parametrize("tp", [1, 2])
def test_what_is_supported(role: str, tp: int) -> None:
    adapter.check_supported(engine(role=role, tp=tp))


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("role", "Hybrid", "role"),
        ("dp", 2, "dp"),
        ("ep", 2, "ep"),
        ("num_replicate_key_value_heads", 2, "num_replicate_key_value_heads"),
        ("quant_policy", 8, "quant-policy"),
        ("enable_prefix_caching", True, "enable-prefix-caching"),
        ("kernel_block_size", 32, "kernel-block-size"),
        ("window_size", 512, "window"),
    ],
)
def test_what_is_not_is_refused_by_its_name(name: str, value: Any, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        adapter.check_supported(engine(**{name: value}))
    assert (caught.value.field, caught.value.ours) == (field, str(value))
