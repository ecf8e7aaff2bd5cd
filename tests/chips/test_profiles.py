"""The catalogue of chips: complete, cited, and in step with kvconnector's catalogue of layouts and with the docs."""

from __future__ import annotations

import dataclasses
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deeplink.chips import sources
from deeplink.chips.catalogue import PROFILES
from deeplink.chips.profile import Figure, Pci, Profile, Rates, Served, Source, Tool, Vendor
from deeplink.kvconnector.layouts.catalogue import ENTRIES
from deeplink.plugins import load_plugins

ROOT = Path(__file__).parents[2]
LAYOUTS = {entry.name: entry for entry in ENTRIES}
SERVED = [(profile.name, served) for profile in PROFILES for served in profile.served]
ASKED_FOR = (
    "ascend-910b",
    "ascend-910c",
    "ascend-310p",
    "metax-c500",
    "metax-c550",
    "thead-ppu",
    "biren-br100",
    "biren-br166",
    "hygon-",
    "mthreads-s4000",
    "mthreads-s5000",
    "enflame-s60",
    "iluvatar-bi-v150",
    "cambricon-mlu",
    "nvidia-",
    "amd-",
    "intel-",
    "cpu-",
)


def test_every_chip_that_was_asked_for() -> None:
    for name in ASKED_FOR:
        assert any(profile.name.startswith(name) for profile in PROFILES), name


def test_names_are_unique_and_registered() -> None:
    names = [profile.name for profile in PROFILES]
    assert len(names) == len(set(names))
    assert len({profile.title for profile in PROFILES}) == len(names)
    assert set(names) <= set(load_plugins().chips.items)


def _within(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, tuple):
        for inner in value:
            yield from _within(inner)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _within(getattr(value, field.name))


@pytest.mark.parametrize("kind", [Profile, Vendor, Tool, Pci, Served, Rates, Figure, Source])
def test_profiles_are_frozen_and_slotted(kind: type) -> None:
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert "__slots__" in vars(kind)


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_every_value_has_a_source(profile: Profile) -> None:
    known = {value for value in vars(sources).values() if isinstance(value, Source)}
    for value in _within(profile):
        if isinstance(value, Source):
            assert value in known
            assert value.where
        if isinstance(value, Figure):
            assert value.value > 0
    assert (profile.dtypes is None) == (profile.dtypes_source is None)
    assert (profile.vendor is None) == bool(profile.cpu)
    if profile.vendor is not None:
        assert profile.models
        assert profile.vendor.sources
        assert profile.vendor.tools
        assert profile.vendor.nodes or profile.vendor.drm


def test_every_source_is_used() -> None:
    used = {value for value in _within(PROFILES) if isinstance(value, Source)}
    assert {name for name, value in vars(sources).items() if isinstance(value, Source) and value not in used} == set()


@pytest.mark.parametrize(("name", "served"), SERVED, ids=lambda value: getattr(value, "engine", value))
def test_layouts_are_those_of_kvconnector(name: str, served: Served) -> None:
    if served.layouts is None:
        assert served.note, "why the layout is not known"
        return
    entries = [LAYOUTS[layout] for layout in served.layouts]
    assert set(served.dtypes or ()) <= {dtype for entry in entries for dtype in entry.dtypes}
    # A chip may have another one's layout, and the note says so.
    assert served.note or all(entry.engine.lower().startswith(served.engine.lower()) for entry in entries)


def test_no_number_on_the_bus_and_no_model_means_two_chips() -> None:
    numbers = [
        (vendor, device)
        for profile in PROFILES
        if profile.vendor
        for vendor in profile.vendor.pci
        for pci in profile.pci
        for device in pci.devices
    ]
    assert len(numbers) == len(set(numbers))
    models = ["910B", "910B2C", "910B4-1", "Ascend910B3", "910C", "Ascend910", "Ascend910_9391", "310P3", "310P"]
    models += ["MetaX C500", "MXC500", "MXC550", "PPU-ZW810E", "Biren166M", "BR100", "K100_AI", "BW1000", "MTT S4000"]
    models += [
        "MTT S5000",
        "S60",
        "Enflame S60G",
        "Iluvatar BI-V150",
        "MLU370-X8",
        "MLU590",
        "NVIDIA H20",
        "NVIDIA H200",
    ]
    for model in models:
        assert len([profile for profile in PROFILES if profile.is_model(model)]) == 1, model
    for model in ("910A", "Ascend910A", "310", "310B4", "C600", "K100", "BW", "S90", "MR-V100", "GB10", "", "MLU220"):
        assert not [profile for profile in PROFILES if profile.is_model(model)], model


def test_the_documentation_is_what_the_profiles_say() -> None:
    """Write it with `python tools/chips_page.py`."""
    page = runpy.run_path(str(ROOT / "tools" / "chips_page.py"))["page"]
    assert (ROOT / "docs" / "chips.md").read_text() == page(PROFILES)
