"""What a vendor is, without torch: names, protocols, and who is registered."""

from __future__ import annotations

import importlib.util
import inspect
from typing import get_args, get_type_hints

import pytest
from click.testing import CliRunner

from deeplink.cli import main
from deeplink.errors import PluginError, UnsupportedOperator
from deeplink.plugins import load_plugins
from lmdeploy_deeplink import dlinfer, reference
from lmdeploy_deeplink.operators import attention, caches, elementwise, experts, formats, matmul, norms
from lmdeploy_deeplink.operators.vendor import NAMES, Operators, Vendor

# What dlinfer takes beyond the interface, each with a default of its own.
BEYOND = {"head_size_v", "chunked_moe_layout"}
MODULES = (attention, caches, elementwise, experts, formats, matmul, norms)
without_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is installed")


def protocols() -> dict[str, type]:
    hints = get_type_hints(Operators)
    return {name: get_args(hint)[0] for name, hint in hints.items()}


def test_there_are_the_operators_that_dlinfer_defines() -> None:
    assert set(NAMES) == set(dlinfer.PARAMETERS)
    assert len(NAMES) == 21


@pytest.mark.parametrize("name", NAMES)
def test_an_operator_is_called_with_what_dlinfer_calls_it(name: str) -> None:
    taken = list(inspect.signature(protocols()[name].__call__).parameters)[1:]
    assert taken == [each for each in dlinfer.PARAMETERS[name].split() if each not in BEYOND]


def test_every_protocol_says_what_it_means() -> None:
    defined = {
        kind
        for module in MODULES
        for kind in vars(module).values()
        if getattr(kind, "__module__", "") == module.__name__
    }
    assert defined == set(protocols().values())
    for kind in defined:
        assert kind.__doc__, kind
        assert kind.__call__.__doc__, kind


def linear(**_: object) -> str:
    return "called"


def test_a_vendor_lacks_what_it_does_not_bring() -> None:
    vendor = Vendor("mine", "1", "cpu", Operators(linear=linear), absent={"rms_norm": "takes other parameters"})
    assert vendor.has() == ["linear"]
    assert vendor.get("linear")() == "called"
    with pytest.raises(UnsupportedOperator, match=r"mine has no silu_and_mul.*it has: linear"):
        vendor.get("silu_and_mul")
    with pytest.raises(UnsupportedOperator, match="no rms_norm: takes other parameters"):
        vendor.get("rms_norm")


def test_vendors_do_not_share_operators() -> None:
    one = Vendor("one", "1", "cpu", Operators())
    other = one.replaced(linear=linear)
    assert one.has() == []
    assert other.has() == ["linear"]
    with pytest.raises(TypeError):
        one.replaced(no_such_operator=linear)


def test_both_vendors_are_registered_and_nothing_is_loaded_for_it() -> None:
    assert load_plugins().operators.items == {"reference": reference.load, "dlinfer": dlinfer.load}


def test_dlinfer_says_that_it_is_not_there() -> None:
    with pytest.raises(PluginError, match="dlinfer is not installed"):
        dlinfer.load()


@without_torch
def test_the_reference_says_that_torch_is_not_there() -> None:
    with pytest.raises(PluginError, match=r"torch.*run deeplink with the Python of the engine"):
        reference.load()


@without_torch
def test_nothing_tested_is_no_success() -> None:
    done = CliRunner().invoke(main, ["conform"])
    assert done.exit_code == 1
    assert "reference: untested" in done.output


def test_a_vendor_of_another_name() -> None:
    done = CliRunner().invoke(main, ["conform", "--vendor", "theirs"])
    assert done.exit_code == 2
    assert "known: dlinfer, reference" in done.output
