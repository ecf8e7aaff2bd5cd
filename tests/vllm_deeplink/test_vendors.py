"""What is told of vendors' platform plugins: plugin, distribution, exception and the way out."""

from __future__ import annotations

from pathlib import Path

import made_vendor
import pytest
from host import Host

from deeplink.chips.catalogue import ascend, hygon
from deeplink.chips.detect import detect
from deeplink.errors import PluginError
from vllm_deeplink import vendors

CLASS = "class Platform:\n    pass\n"


def refused() -> PluginError:
    with pytest.raises(PluginError) as caught:
        vendors.check(vendors.look())
    return caught.value


def test_none(site: Path) -> None:
    assert vendors.look() == ()
    assert vendors.check(()) is None


def test_deeplinks_own_is_none(site: Path) -> None:
    made_vendor.install(site, "deeplink_platform", distribution="deeplink-again", module="vllm_deeplink")
    assert vendors.look() == ()


def test_one_that_serves(site: Path) -> None:
    made_vendor.install(site, "ascend", 'return "vllm_ascend.platform.Platform"', platform=CLASS)
    made_vendor.install(site, "musa")
    ascend_, musa = vendors.look()
    assert (ascend_.name, ascend_.distribution, ascend_.version) == ("ascend", "vllm-ascend", "1.2")
    assert musa.serves is None
    assert vendors.check([ascend_, musa]) == ascend_


def test_two_that_serve(site: Path) -> None:
    for name in ("ascend", "musa"):
        made_vendor.install(site, name, f'return "vllm_{name}.platform.Platform"', platform=CLASS)
    error = refused()
    for word in ("'ascend' (vllm_ascend:register) of vllm-ascend 1.2", "'musa'", "vllm-musa 1.2"):
        assert word in error.message
    assert (error.ours, error.theirs) == ("vllm-ascend", "vllm-musa")
    assert "VLLM_PLUGINS" in error.remedy
    assert "uninstall one of vllm-ascend, vllm-musa" in error.remedy


def test_two_that_serve_and_one_is_left_out(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ascend", "musa"):
        made_vendor.install(site, name, f'return "vllm_{name}.platform.Platform"', platform=CLASS)
    monkeypatch.setenv(vendors.ALLOWED, "deeplink_engine, musa")
    serving = vendors.check(vendors.look())
    assert serving is not None
    assert serving.name == "musa"
    assert [one.allowed for one in vendors.look()] == [False, True]


def test_two_of_one_name(site: Path) -> None:
    """vLLM keeps plugins by name, so one of them would be gone without a word."""
    made_vendor.install(site, "npu", module="vllm_one", distribution="vllm-one")
    made_vendor.install(site, "npu", module="vllm_two", distribution="vllm-two")
    error = refused()
    assert "vllm-one 1.2" in error.message
    assert "vllm-two 1.2" in error.message


def test_metadata_twice(site: Path) -> None:
    """As where a checkout and what was built of it are both on the path."""
    made_vendor.install(site, "ascend", 'return "vllm_ascend.platform.Platform"', platform=CLASS)
    made_vendor.install(site, "ascend", None, version="1.1")
    assert len(vendors.look()) == 1


def test_an_import_that_fails(site: Path) -> None:
    made_vendor.install(
        site, "ascend", 'return "vllm_ascend.platform.Platform"', platform="import torch_npu_is_not_here\n"
    )
    error = refused()
    assert "'ascend' (vllm_ascend:register) of vllm-ascend 1.2 fails: ModuleNotFoundError" in error.message
    assert "torch_npu_is_not_here" in error.message
    assert "install what has torch_npu_is_not_here" in error.remedy
    assert isinstance(error.__cause__, ModuleNotFoundError)


def test_libraries_of_another_release(site: Path) -> None:
    body = "raise ImportError('libhccl.so: undefined symbol: xyz')\n"
    made_vendor.install(site, "ascend", 'return "vllm_ascend.platform.Platform"', platform=body)
    error = refused()
    assert "undefined symbol: xyz" in error.message
    assert "that vllm-ascend 1.2 was built for" in error.remedy


def test_a_class_that_is_not_there(site: Path) -> None:
    made_vendor.install(site, "ascend", 'return "vllm_ascend.platform.NPU"', platform=CLASS)
    assert "AttributeError" in refused().message


def test_a_search_for_devices_that_fails(site: Path) -> None:
    """vLLM notes this where nobody looks, and goes on on the processor."""
    made_vendor.install(site, "musa", "raise RuntimeError('no driver')")
    error = refused()
    assert "'musa' (vllm_musa:register) of vllm-musa 1.2 fails: RuntimeError: no driver" in error.message
    assert "driver" in error.remedy


def test_a_stale_installation(site: Path) -> None:
    made_vendor.install(site, "metax", None)
    (found,) = vendors.look()
    assert found.stale
    error = refused()
    assert "vllm-metax 1.2 fails: ModuleNotFoundError: No module named 'vllm_metax'" in error.message
    assert "pip uninstall vllm-metax" in error.remedy
    assert "--force-reinstall --no-deps vllm-metax==1.2" in error.remedy


def test_a_plugin_that_is_left_out_is_not_imported(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_vendor.install(site, "metax", None)
    monkeypatch.setenv(vendors.ALLOWED, "")
    assert vendors.check(vendors.look()) is None


# -- chips that nothing serves -------------------------------------------------------------------------------


def npu(tmp_path: Path, *, passed_in: bool = True) -> Host:
    host = Host(tmp_path / "host")
    host.bus()
    host.pci("0000:c1:00.0", "19e5:d802", driver="devdrv_device_driver")
    if passed_in:
        host.nodes("dev/davinci0", "dev/davinci_manager")
    return host


def served(host: Host) -> None:
    profiles = (*ascend.PROFILES, *hygon.PROFILES)
    vendors.check_served(vendors.look(), detect(profiles, host.root, host.run), profiles)


def unserved(host: Host) -> PluginError:
    with pytest.raises(PluginError) as caught:
        served(host)
    return caught.value


def test_a_chip_without_its_plugin(site: Path) -> None:
    error = unserved(npu(site))
    assert "Ascend 910B is here, and its plugin vllm-ascend is not installed" in error.message
    assert "pip install vllm-ascend" in error.remedy
    assert "VLLM_TARGET_DEVICE=cpu" in error.remedy
    assert (error.ours, error.theirs) == ("none", "vllm-ascend")


def test_a_chip_whose_plugin_does_not_see_it(site: Path) -> None:
    made_vendor.install(site, "ascend", distribution="vllm_ascend")
    error = unserved(npu(site))
    assert "finds no device: 'ascend' (vllm_ascend:register) of vllm_ascend 1.2" in error.message


def test_a_chip_whose_plugin_is_left_out(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_vendor.install(site, "ascend")
    monkeypatch.setenv(vendors.ALLOWED, "deeplink_engine")
    error = unserved(npu(site))
    assert "is left out by VLLM_PLUGINS=deeplink_engine" in error.message
    assert "add ascend to VLLM_PLUGINS" in error.remedy


def test_whoever_wants_the_processor_says_so(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(vendors.TARGET, "cpu")
    served(npu(site))


def test_a_chip_that_was_not_passed_in(site: Path) -> None:
    served(npu(site, passed_in=False))


def test_no_chip(site: Path) -> None:
    host = Host(site / "host")
    host.bus()
    served(host)
