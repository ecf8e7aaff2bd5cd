"""Which device an engine runs on, by what is installed here."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest

from deeplink.errors import PluginError
from lmdeploy_deeplink.engine import platform


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> object:
    """`host(cuda=…, dlinfer=…)`: a host with or without; `dlinfer` is the chip it is built for."""
    find = importlib.util.find_spec

    def made(*, cuda: bool = False, dlinfer: str | None = None, loads: bool = True) -> None:
        torch = ModuleType("torch")
        torch.cuda = SimpleNamespace(is_available=lambda: cuda)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "torch", torch)
        there = ModuleSpec("dlinfer", None) if dlinfer else None
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *rest: there if name == "dlinfer" else find(name, *rest)
        )
        if dlinfer:
            vendor = ModuleType("dlinfer.vendor")
            vendor.vendor_name = dlinfer  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, "dlinfer", ModuleType("dlinfer"))
            monkeypatch.setitem(sys.modules, "dlinfer.vendor", vendor if loads else None)

    return made


def test_cuda_is_lmdeploys_own(host) -> None:  # type: ignore[no-untyped-def]
    host(cuda=True)
    assert platform.resolve() == "cuda"


def test_dlinfer_comes_before_cuda(host) -> None:  # type: ignore[no-untyped-def]
    """MetaX's chips look like CUDA to torch."""
    host(cuda=True, dlinfer="maca")
    assert platform.resolve() == "maca"


def test_else_the_cpu(host) -> None:  # type: ignore[no-untyped-def]
    host()
    assert platform.resolve() == "cpu"


def test_a_dlinfer_that_does_not_load_is_no_reason_for_the_cpu(host) -> None:  # type: ignore[no-untyped-def]
    host(dlinfer="ascend", loads=False)
    with pytest.raises(PluginError, match="does not load"):
        platform.resolve()
