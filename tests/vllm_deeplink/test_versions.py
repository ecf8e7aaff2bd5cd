"""Which released vLLM the plugin takes as which tested version, and by what it refuses the others."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from descriptions import VERSIONS, load

from deeplink.errors import ConfigError
from deeplink.local.environment import VLLM_CPU_LOCKS
from vllm_deeplink import versions
from vllm_deeplink.versions import interface
from vllm_deeplink.versions.expected import CONNECTOR, CPU, GROUPS
from vllm_deeplink.versions.interface import Interface, Method
from vllm_deeplink.versions.version import Version

FITS = {"0.27.1": "0.27.1", "0.29.0": "0.29.0", "0.32.0": "0.32.0", "0.33.0": "0.32.0"}
POOL, HANDSHAKE = f"{CONNECTOR}.bind_gpu_block_pool", f"{CONNECTOR}.set_xfer_handshake_metadata_pp_aware"
WRITE = f"{CPU}:CPUAttentionBackendImpl.do_kv_cache_update"
REFUSED = {
    "0.18.1": POOL,
    "0.19.1": POOL,
    "0.20.2": POOL,
    "0.21.0": POOL,
    "0.22.1": HANDSHAKE,
    "0.23.0": WRITE,
}


def test_every_description_is_judged() -> None:
    assert set(VERSIONS) == FITS.keys() | REFUSED.keys()


@pytest.mark.parametrize(("version", "taken"), FITS.items())
def test_fits(version: str, taken: str) -> None:
    assert versions.choose(load(version), cpu=True).name == taken
    assert versions.choose(load(version), cpu=False).name == taken
    assert versions.is_tested(version) == (version == taken)


@pytest.mark.parametrize(("version", "field"), REFUSED.items())
def test_refused_on_a_cpu_because_of(version: str, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        versions.choose(load(version), cpu=True)
    assert caught.value.field == field
    assert caught.value.theirs == "nothing"
    assert version in caught.value.message
    assert field.rpartition(".")[2] in caught.value.message
    assert "use vLLM 0.27.1, 0.29.0, 0.32.0" in caught.value.remedy


@pytest.mark.parametrize(("version", "field"), REFUSED.items())
def test_elsewhere_only_the_attention_of_cpus_does_not_count(version: str, field: str) -> None:
    if field == WRITE:
        assert versions.choose(load(version), cpu=False).name == "0.29.0"
        return
    with pytest.raises(ConfigError) as caught:
        versions.choose(load(version), cpu=False)
    assert caught.value.field == field
    assert CPU not in caught.value.message


def test_the_tested_versions_have_environments() -> None:
    assert [tested.name for tested in reversed(versions.TESTED)] == list(VLLM_CPU_LOCKS)


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        ("0.32.0", True),
        ("0.32.1+cpu", True),
        ("0.31.0", False),
        ("0.33.0rc1", False),
        ("1.32.0", False),
        ("dev", False),
    ],
)
def test_tested_is_by_series(version: str, tested: bool) -> None:
    assert versions.is_tested(version) is tested


@pytest.mark.parametrize("tested", versions.TESTED, ids=lambda tested: tested.name)
def test_all_that_the_connector_has_for_vllm_is_expected(tested: Version) -> None:
    """With the parameters that it has them with; a method added to it must be added there too."""
    package = Path(versions.__file__).parents[1]
    places = ["connector.py:DeepLinkConnector", f"versions/{tested.reports.__module__.rpartition('.')[2]}.py:Reports"]
    ours = interface.read(package, "ours", places)
    methods = {
        name: tuple(text.rstrip("=") for text in method.parameters)
        for place in places
        for name, method in ours.classes[place].methods.items()
        if not name.startswith("_") or name == "__init__"
    }
    expected = {**tested.expected.overridden[CONNECTOR], **tested.expected.overridden[GROUPS]}
    assert methods == expected


def changed(version: str, place: str, **methods: Method | None) -> Interface:
    """The interface of `version` with these methods of one class instead, or without them."""
    found = load(version)
    old = found.classes[place]
    made = {name: method for name, method in {**old.methods, **methods}.items() if method is not None}
    return Interface(found.version, {**found.classes, place: replace(old, methods=made)})


@pytest.mark.parametrize(
    ("methods", "where", "theirs"),
    [
        ({"wait_for_save": Method(("step",))}, "wait_for_save", "(step)"),
        ({"request_finished": Method(("request",))}, "request_finished", "(request)"),
        ({"_get_connector_metadata": Method(("step",))}, "_get_connector_metadata", "(step)"),
        ({"begin_load": Method((), abstract=True)}, "begin_load", "an abstract method"),
    ],
)
def test_what_differs_is_named(methods: dict[str, Method], where: str, theirs: str) -> None:
    """Also for a tested version, which a vendor may have changed without another name."""
    for version in ("0.33.0", "0.32.0"):
        with pytest.raises(ConfigError, match=rf"vLLM {version} has another interface") as caught:
            versions.choose(changed(version, CONNECTOR, **methods), cpu=True)
        assert (caught.value.field, caught.value.theirs) == (f"{CONNECTOR}.{where}", theirs)


def test_a_parameter_more_with_a_default_is_no_difference_for_what_we_call() -> None:
    more = Method(("step=", "*more", "**others"))
    assert versions.choose(changed("0.32.0", CONNECTOR, _get_connector_metadata=more), cpu=True).name == "0.32.0"


def test_between_two_tested_versions_it_is_the_newest_that_fits() -> None:
    """0.30 and 0.31 are not tested; a vLLM without results by request is taken as 0.29."""
    found = load("0.29.0")
    assert versions.choose(Interface("0.31.0", found.classes), cpu=True).name == "0.29.0"
    assert versions.choose(Interface("0.30.0", load("0.32.0").classes), cpu=True).name == "0.32.0"


def test_several_cache_groups_need_failures_by_request() -> None:
    for tested in versions.TESTED:
        tested.check_groups(1)
        if tested.name == "0.32.0":
            tested.check_groups(2)
        else:
            with pytest.raises(ConfigError, match="tells a failed load by its blocks") as caught:
                tested.check_groups(2)
            assert (caught.value.field, caught.value.ours) == ("KV cache groups", "2")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: pytest.TempPathFactory) -> ModuleType:
    """A vLLM to be found by `current`, whose sources are not there."""
    made = ModuleType("vllm")
    made.__file__ = f"{tmp_path}/__init__.py"
    platforms = ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(is_cpu=lambda: True)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", made)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    versions.current.cache_clear()
    return made


def test_an_untested_one_is_warned_about(
    installed: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed.__version__ = "0.33.0"  # type: ignore[attr-defined]
    monkeypatch.setattr(versions.interface, "read", lambda folder, version, places: load(version))
    with caplog.at_level(logging.WARNING):
        assert versions.current().name == "0.32.0"
    assert "vLLM 0.33.0 is not among the versions that deeplink is tested with (0.27.1, 0.29.0, 0.32.0)" in caplog.text


def test_a_vllm_without_sources_is_refused(installed: ModuleType) -> None:
    installed.__version__ = "0.32.0"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"found nothing, and \d+ more"):
        versions.current()
