"""Plugin discovery: nothing is swallowed, nothing is ambiguous."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest

from deeplink import hookimpl
from deeplink.chips.profile import Profile
from deeplink.errors import PluginError
from deeplink.plugins import DISABLE, GROUP, ONLY, load_plugins
from deeplink.registry import Registry


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (ONLY, DISABLE):
        monkeypatch.delenv(variable, raising=False)


def module(**hooks: object) -> ModuleType:
    made = ModuleType("made")
    for name, function in hooks.items():
        setattr(made, name, hookimpl(function))  # type: ignore[call-overload]
    return made


def layouts(*names: str) -> ModuleType:
    def deeplink_register_layouts(register) -> None:  # type: ignore[no-untyped-def]
        for name in names:
            register(name, "block token head (kv dim)")

    return module(deeplink_register_layouts=deeplink_register_layouts)


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch) -> object:
    def _entry(name: str, plugin: ModuleType | None = None, value: str = "") -> EntryPoint:
        value = value or f"test_plugin_{name}"
        if plugin is not None:
            monkeypatch.setitem(sys.modules, value, plugin)
        return EntryPoint(name, value, GROUP)

    return _entry


def test_what_is_installed_loads() -> None:
    plugins = load_plugins()
    assert plugins.failed == {}
    assert set(plugins.transports.items) == {"dlslime", "mooncake", "nixl", "shm", "tcp"}
    assert "vllm-nhd" in plugins.layouts.items
    assert "least_load" in plugins.policies.items


def test_every_layout_a_plugin_brings_can_be_read() -> None:
    from deeplink.kvconnector.layouts.layout import Layout

    for text in load_plugins().layouts.items.values():
        assert str(Layout.parse(text)) == text


def test_a_broken_plugin_is_kept_with_its_exception(entry, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
    plugins = load_plugins([entry("broken", value="no_such_module_at_all"), entry("good", layouts("mine"))])
    assert set(plugins.layouts.items) == {"mine"}
    assert set(plugins.failed) == {"broken"}
    assert isinstance(plugins.failed["broken"], ModuleNotFoundError)
    assert "broken" in caplog.text
    assert "no_such_module_at_all" in caplog.text


def test_a_hook_with_other_arguments_is_kept_too(entry) -> None:  # type: ignore[no-untyped-def]
    def deeplink_register_layouts(registry) -> None:  # type: ignore[no-untyped-def]
        raise AssertionError

    plugins = load_plugins([entry("odd", module(deeplink_register_layouts=deeplink_register_layouts))])
    assert "odd" in plugins.failed


def test_a_misspelt_hook(entry) -> None:  # type: ignore[no-untyped-def]
    def deeplink_register_layout(register) -> None:  # type: ignore[no-untyped-def]
        raise AssertionError

    with pytest.raises(PluginError, match="deeplink_register_layout"):
        load_plugins([entry("odd", module(deeplink_register_layout=deeplink_register_layout))])


def test_one_layout_name_from_two_plugins(entry) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(PluginError, match="layout 'mine' is registered twice") as caught:
        load_plugins([entry("a", layouts("mine")), entry("b", layouts("mine"))])
    assert DISABLE in caught.value.remedy


def test_one_name_for_two_plugins(entry) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(PluginError, match="two plugins are named 'a'") as caught:
        load_plugins([entry("a", layouts("x"), "module_one"), entry("a", layouts("y"), "module_two")])
    assert (caught.value.ours, caught.value.theirs) == ("module_one", "module_two")


def test_one_plugin_listed_twice(entry) -> None:  # type: ignore[no-untyped-def]
    """An editable install next to an old egg-info."""
    plugins = load_plugins([entry("a", layouts("x")), entry("a")])
    assert set(plugins.layouts.items) == {"x"}


@pytest.mark.parametrize(
    ("only", "disabled", "expected"),
    [
        (None, None, {"a", "b", "c"}),
        ("a", None, {"a"}),
        (" a , c,", None, {"a", "c"}),
        ("", None, set()),
        (None, "b", {"a", "c"}),
        ("a,b", "b", {"a"}),
        (None, "", {"a", "b", "c"}),
    ],
)
def test_choosing(
    entry, monkeypatch: pytest.MonkeyPatch, only: str | None, disabled: str | None, expected: set
) -> None:  # type: ignore[no-untyped-def, type-arg]
    if only is not None:
        monkeypatch.setenv(ONLY, only)
    if disabled is not None:
        monkeypatch.setenv(DISABLE, disabled)
    assert set(load_plugins([entry(name, layouts(name)) for name in "cab"]).layouts.items) == expected


def test_a_disabled_plugin_is_not_even_imported(entry, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv(DISABLE, "broken")
    assert load_plugins([entry("broken", value="no_such_module_at_all")]).failed == {}


@pytest.mark.parametrize("variable", [ONLY, DISABLE])
def test_unknown_names(entry, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv(variable, "a,typo,mistake")
    with pytest.raises(PluginError) as caught:
        load_plugins([entry("a", layouts("a")), entry("b", layouts("b"))])
    assert f"{variable} names mistake, typo" in caught.value.message
    assert caught.value.remedy == "installed: a, b"


def test_a_registry() -> None:
    registry: Registry[int] = Registry("thing")
    registry.register("one", 1)
    assert registry.get("one") == 1
    with pytest.raises(PluginError, match=r"no thing named 'two' \(known: one\)"):
        registry.get("two")
    with pytest.raises(PluginError, match="thing 'one' is registered twice"):
        registry.register("one", 2)
    assert registry.get("one") == 1


def chips(*names: str) -> ModuleType:
    def deeplink_register_chips(register) -> None:  # type: ignore[no-untyped-def]
        for name in names:
            register(name, Profile(name, name.upper(), None))

    return module(deeplink_register_chips=deeplink_register_chips)


def test_a_plugin_may_add_chips(entry: object) -> None:
    plugins = load_plugins([entry("acme", chips("acme-1", "acme-2"))])  # type: ignore[operator]
    assert [profile.title for profile in plugins.chips.items.values()] == ["ACME-1", "ACME-2"]
    with pytest.raises(PluginError, match="chip 'acme-1' is registered twice"):
        load_plugins([entry("acme", chips("acme-1")), entry("other", chips("acme-1"))])  # type: ignore[operator]
