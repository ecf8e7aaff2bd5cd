"""A package called dlinfer for the adapter's test, and a program that runs the suite on it through the adapter.

Its operators take what those of dlinfer 0.2.8 take, and compute with the reference's; they have the habits that the
adapter is there for: results with one more axis, inputs that are overwritten, three ways to say that something is not
there.
Run with the name of a chip; prints {"version", "device", "axes", "absent", "rows"}.
"""

from __future__ import annotations

import enum
import json
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import msgspec
import torch

from lmdeploy_deeplink import dlinfer, reference
from lmdeploy_deeplink.conformance.rows import rows
from lmdeploy_deeplink.conformance.run import run
from lmdeploy_deeplink.conformance.suite import cases
from lmdeploy_deeplink.operators.vendor import NAMES

RIGHT = reference.load().operators
MISSING = ("incre_flash_attention", "transdata")


class Way(enum.Enum):
    NAIVE = enum.auto()
    UNDEFINED = enum.auto()


@dataclass
class Metadata:
    moe_comm_type: Way = Way.UNDEFINED


def add_rms_norm(**told: Any) -> Any:
    normed, added = RIGHT.add_rms_norm(**told)
    told["residual"].copy_(added)
    return told["hidden_states"].copy_(normed), told["residual"]


def apply_rotary_pos_emb(**told: Any) -> Any:
    return [turned.unsqueeze(0) for turned in RIGHT.apply_rotary_pos_emb(**told)]


def moe_gating_topk_softmax(moe_metadata: Metadata, **told: Any) -> Any:
    assert moe_metadata.moe_comm_type is Way.NAIVE
    return [flat.view(-1) for flat in RIGHT.moe_gating_topk_softmax(moe_metadata=None, **told)]


def fused_moe(moe_metadata: Metadata, chunked_moe_layout: Any = None, **told: Any) -> Any:
    assert moe_metadata.moe_comm_type is Way.NAIVE
    return RIGHT.fused_moe(moe_metadata=None, **told)


def prefill_attention(**told: Any) -> Any:
    if told["alibi_slopes"] is not None:
        raise RuntimeError("prefill_attention does not support alibi_slopes yet")
    return RIGHT.prefill_attention(**told)


def paged_decode_attention(head_size_v: int = 0, **told: Any) -> Any:
    return RIGHT.paged_decode_attention(**told)


def paged_prefill_attention(head_size_v: int = 0, **told: Any) -> Any:
    return RIGHT.paged_prefill_attention(**told)


def fused_attention(**told: Any) -> Any:
    raise NotImplementedError("Not implemented on this chip.")


def token_first(function: Any) -> Any:
    """For a chip whose blocks have their heads first: the reference's have their tokens first."""

    def called(**told: Any) -> Any:
        caches = {name: told[name].transpose(1, 2) for name in ("key_cache", "value_cache")}
        return function(**{**told, **caches})

    return called


PAGED = ("fill_kv_cache", "paged_decode_attention", "paged_prefill_attention")
OWN = (add_rms_norm, apply_rotary_pos_emb, moe_gating_topk_softmax, fused_moe, prefill_attention, fused_attention)
OWN += (paged_decode_attention, paged_prefill_attention)


def signed(name: str, function: Any) -> Any:
    """With the parameters of dlinfer 0.2.8, which is all that the adapter knows it by."""
    names = dlinfer.PARAMETERS[name].split()
    defaults = {"head_size_v": "0", "chunked_moe_layout": "None"}
    # From the first that has a default on, all must have one.
    first = next((place for place, each in enumerate(names) if each in defaults), len(names))
    takes = ", ".join(f"{each}={defaults.get(each, 'None')}" if n >= first else each for n, each in enumerate(names))
    gives = ", ".join(f"{each}={each}" for each in names)
    space: dict[str, Any] = {"function": function}
    exec(f"def {name}({takes}): return function({gives})", space)
    return space[name]


def package(chip: str) -> None:
    own = {function.__name__: function for function in OWN}
    ops = ModuleType("dlinfer.ops")
    for name in NAMES:
        if name not in MISSING:
            function = own.get(name, getattr(RIGHT, name))
            if chip == "camb" and name in PAGED:
                function = token_first(function)
            setattr(ops, name, signed(name, function))
    # As a release that changed it.
    ops.rms_norm_w8a8 = lambda hidden_states, weight, epsilon, quant_dtype, smooth: None
    vendor = ModuleType("dlinfer.vendor")
    vendor.vendor_name = chip
    vendor.vendor_ops_registry = {name: getattr(ops, name) for name in NAMES if name not in MISSING}
    annotations = ModuleType("dlinfer.utils.type_annotation")
    annotations.MoeMetadata, annotations.MoECommType = Metadata, Way
    whole, utils = ModuleType("dlinfer"), ModuleType("dlinfer.utils")
    whole.__version__ = "0.2.8"
    for module in (whole, ops, vendor, utils, annotations):
        sys.modules[module.__name__] = module


def main(chip: str) -> None:
    package(chip)
    vendor = dlinfer.load()
    told = {"version": vendor.version, "device": vendor.device, "axes": vendor.cache_axes, "absent": vendor.absent}
    # There is no such device here; the operators of the package compute where the tensors are.
    here = type(vendor)(vendor.name, vendor.version, "cpu", vendor.operators, vendor.cache_axes, vendor.absent)
    json.dump({**told, "rows": msgspec.to_builtins(rows(vendor.name, run(here, cases())))}, sys.stdout)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
