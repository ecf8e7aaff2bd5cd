"""The platform is looked at and decorated, never replaced. With vLLM itself: `tests/engines/test_platform.py`."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import made_vendor
import pytest

from deeplink.errors import ConfigError
from vllm_deeplink import platform, platform_plugin


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("vllm serve m --platform deeplink", True),
        ("vllm serve m --platform=deeplink --port 1", True),
        ("vllm serve m --platform auto", False),
        ("vllm serve deeplink --platform", False),
        ("vllm serve m", False),
        ("", False),
    ],
)
def test_the_command_line_asks(words: str, wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(platform.VARIABLE, raising=False)
    assert platform.asked(words.split()) is wanted
    monkeypatch.setenv(platform.VARIABLE, "deeplink")
    assert platform.asked(words.split())


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("model: m\nplatform: deeplink\n", True),
        ("platform: 'deeplink'  # both ways\n", True),
        ("platform: auto\n", False),
        ("# platform: deeplink\n", False),
        ("a-platform: deeplink\n", False),
        ("\x00", False),
    ],
)
def test_a_file_asks(text: str, wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(platform.VARIABLE, raising=False)
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    assert platform.asked(["vllm", "serve", "--config", str(file)]) is wanted
    assert platform.asked(["vllm", "serve", f"--config={file}"]) is wanted


def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(platform.VARIABLE, raising=False)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name in ("bytes", "nothing", "."):
        assert not platform.asked(["vllm", "--config", str(tmp_path / name)])


def test_it_offers_no_platform_but_explains(
    site: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made_vendor.install(site, "gone", None)
    monkeypatch.setenv(platform.VARIABLE, "auto")
    assert platform_plugin() is None  # type: ignore[func-returns-value]
    assert not caplog.records
    monkeypatch.setenv(platform.VARIABLE, "deeplink")
    assert platform_plugin() is None  # type: ignore[func-returns-value]
    (told,) = caplog.records
    assert told.levelno == logging.ERROR
    assert "vllm-gone 1.2" in told.getMessage()


# -- the decoration ------------------------------------------------------------------------------------------


class Native:
    """As much of a platform as is decorated; `put` is the connector that it leaves in the config."""

    put: str | None = ""
    seen: int = 0

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        cls.seen += 1
        if cls.put != "":
            vllm_config.kv_transfer_config = cls.put and SimpleNamespace(kv_connector=cls.put)


def config(connector: str | None) -> Any:
    return SimpleNamespace(kv_transfer_config=connector and SimpleNamespace(kv_connector=connector))


@pytest.mark.parametrize("times", [1, 3])
def test_its_own_check_runs_once(times: int) -> None:
    class Vendor(Native):
        seen = 0

    for _ in range(times):
        platform.decorate(Vendor)
    for connector in ("DeepLinkConnector", "Other", None):
        Vendor.check_and_update_config(config(connector))
    assert Vendor.seen == 3
    assert Vendor.__name__ == "Vendor"
    assert "check_and_update_config" in vars(Vendor)
    assert Native.check_and_update_config.__func__.__name__ == "check_and_update_config"
    assert "_deeplink" not in vars(Native)


@pytest.mark.parametrize("put", ["VendorConnector", None])
def test_a_platform_that_replaces_the_connector(put: str | None) -> None:
    class Vendor(Native):
        pass

    Vendor.put = put
    platform.decorate(Vendor)
    with pytest.raises(ConfigError) as caught:
        Vendor.check_and_update_config(config("DeepLinkConnector"))
    assert (caught.value.ours, caught.value.theirs) == ("DeepLinkConnector", put or "none")
    assert "Vendor" in caught.value.message
    Vendor.check_and_update_config(config("Other"))  # which is none of ours to defend


def test_whoever_wants_the_processor_is_told_nothing(
    site: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM then looks at no plugin, so none of them can be in its way."""
    made_vendor.install(site, "gone", None)
    monkeypatch.setenv(platform.VARIABLE, "deeplink")
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "CPU")
    platform_plugin()
    assert not caplog.records
