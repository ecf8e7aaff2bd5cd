"""Beside vendors' platform plugins, in vLLM's own Python, without starting an engine. The plugins are made up: a class
that is the CPU's in all but what vLLM sees of it."""

from __future__ import annotations

from pathlib import Path

import made_vendor
from fleet import Fleet
from test_flags import ask

NPU = """
from vllm.platforms.cpu import CpuPlatform

class NPUPlatform(CpuPlatform):
    device_name = "npu"

    @classmethod
    def check_and_update_config(cls, vllm_config):
        super().check_and_update_config(vllm_config)
        {more}
"""
ASKED = ["--platform", "deeplink", "--model"]


def site(fleet: Fleet, name: str, *plugins: str, more: str = "pass") -> Path:
    folder = fleet.folder / f"site-{name}"
    for plugin in plugins:
        serves = f'return "vllm_{plugin}.platform.NPUPlatform"'
        made_vendor.install(folder, plugin, serves, platform=NPU.format(more=more))
    return folder


def test_a_vendors_platform_stays_and_is_decorated(fleet: Fleet) -> None:
    found = ask(fleet, [*ASKED, str(fleet.model)], site(fleet, "one", "npu"))
    assert (found["platform"], found["decorated"]) == ("NPUPlatform", True)
    assert found["connector"] == "DeepLinkConnector"


def test_a_vendors_platform_that_replaces_the_connector(fleet: Fleet) -> None:
    folder = site(fleet, "own", "npu", more="vllm_config.kv_transfer_config.kv_connector = 'NPUConnector'")
    told = ask(fleet, [*ASKED, str(fleet.model)], folder)
    assert "the platform NPUPlatform has replaced deeplink's KV connector" in told
    assert "ours DeepLinkConnector, theirs NPUConnector" in told


def test_two_vendors(fleet: Fleet) -> None:
    """vLLM does not get so far as to parse the command line; it is told all the same, with what to do."""
    told = ask(fleet, [*ASKED, str(fleet.model)], site(fleet, "two", "npu", "mlu"), DEEPLINK_PLATFORM="deeplink")
    assert "two platform plugins at once: 'mlu' (vllm_mlu:register) of vllm-mlu 1.2" in told
    assert "uninstall one of vllm-mlu, vllm-npu" in told


def test_a_stale_installation(fleet: Fleet) -> None:
    """vLLM itself would go on, on the processor."""
    folder = fleet.folder / "site-stale"
    made_vendor.install(folder, "npu", None)
    told = ask(fleet, [*ASKED, str(fleet.model)], folder)
    assert "PluginError: vLLM's platform plugin 'npu' (vllm_npu:register) of vllm-npu 1.2 fails" in told
    assert "pip uninstall vllm-npu" in told
