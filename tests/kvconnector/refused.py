"""Two engines, and what each field of the second may not be."""

from __future__ import annotations

import msgspec
from loopback import HND, VEC, make_contract, make_group

from deeplink.kvconnector.contracts.contract import Contract, Scales

replace = msgspec.structs.replace

PREFILL = make_contract("p", "prefill", make_group(VEC, 64), channel="127.0.0.1:1", tcp="127.0.0.1:2")
DECODE = make_contract("d", "decode", make_group(HND, 128), channel="127.0.0.1:3", tcp="127.0.0.1:4")
FOREIGN = replace(DECODE, ranks=(DECODE.ranks[0], replace(DECODE.ranks[0], tp=1, heads=((2, 4),))))
"""It has heads that no rank of the other engine has."""


def model(**changes: object) -> Contract:
    return replace(DECODE, model=replace(DECODE.model, **changes))


def group(**changes: object) -> Contract:
    return replace(DECODE, groups=(replace(DECODE.groups[0], **changes),))


REFUSED = {
    "model.architecture": (model(architecture="QwenForCausalLM"), "LlamaForCausalLM", "QwenForCausalLM"),
    "model.layers": (model(layers=4), "3", "4"),
    "model.vocabulary": (model(vocabulary=101), "100", "101"),
    "model.rope": (model(rope='{"theta":1}'), "{}", '{"theta":1}'),
    "model.quantization": (model(quantization="fp8"), "none", "fp8"),
    "model.weights": (model(weights="other"), "w", "other"),
    "groups": (replace(DECODE, groups=DECODE.groups * 2), "1", "2"),
    "groups[0].kind": (group(kind="mla"), "full", "mla"),
    "groups[0].layers": (group(layers=(0, 1)), "(0, 1, 2)", "(0, 1)"),
    "groups[0].heads": (group(heads=4), "2", "4"),
    "groups[0].head_dim": (group(head_dim=64), "32", "64"),
    "groups[0].dtype": (group(dtype="bfloat16"), "float32", "bfloat16"),
    "groups[0].layout": (group(layout="block token head"), VEC, "block token head"),
    "groups[0].window": (group(window=8), "0", "8"),
    "groups[0].scales": (group(scales=Scales("tensor", (1.0,) * 6)), "None", "tensor, 1, 1, 1, 1, 1, 1"),
    "ranks": (FOREIGN, "tp 1, pp 1, dp 1", "tp 2, pp 1, dp 1"),
    "transports": (replace(DECODE, ranks=(replace(DECODE.ranks[0], transports={"rdma": ""}),)), "tcp", "rdma"),
}
"""The second engine with that field changed, the first one's value and the second one's."""
