"""Pairs of unlike engines, as data: what each states otherwise than a plain contract, and what the answer must be.

Fields are named as in a Refusal, with `group.` for every cache group and `rank.` for every rank; the rest of both
contracts is equal. Numbers in `about` are those of the users' cases. Unequal ranks and several groups are not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from loopback import LAYERS

from deeplink.kvconnector.contracts.contract import Contract, Scales, local_address
from deeplink.kvconnector.layouts.catalogue import LAYOUTS

Changes = Mapping[str, object]


@dataclass(frozen=True)
class Pair:
    """`ours` produces, `theirs` consumes. `refused` names the field; with `cast` it is the dtype's unless the operator
    consents to that cast. An exact cast needs no consent. `one_head`: the group has one head."""

    about: str
    ours: Changes = field(default_factory=dict)
    theirs: Changes = field(default_factory=dict)
    refused: str = ""
    cast: str = ""
    exact: bool = True
    one_head: bool = False


def dressed(contract: Contract, changes: Changes) -> Contract:
    """The contract with these fields changed."""
    replace = msgspec.structs.replace
    for name, value in changes.items():
        place, _, last = name.rpartition(".")
        if place == "model":
            contract = replace(contract, model=replace(contract.model, **{last: value}))
        elif place == "group":
            contract = replace(contract, groups=tuple(replace(group, **{last: value}) for group in contract.groups))
        elif place == "rank":
            contract = replace(contract, ranks=tuple(replace(rank, **{last: value}) for rank in contract.ranks))
        else:
            contract = replace(contract, **{last: value})
    return contract


def _kept(entry: str, block_size: int, dtype: str) -> dict[str, Any]:
    return {"group.layout": LAYOUTS[entry], "group.block_size": block_size, "group.dtype": dtype}


ENGINES = {
    "vLLM on CUDA": ("vllm-nhd", 16),
    "vLLM on CUDA, FlashInfer": ("vllm-hnd", 32),
    "vLLM before its layouts were unified": ("vllm-kv-outermost", 16),
    "vLLM, FlashInfer of plug-ins": ("vllm-kv-in-block", 64),
    "vLLM on a CPU": ("vllm-cpu-vec", 128),
    "vLLM on a CPU with AMX": ("vllm-cpu-amx", 128),
    "vLLM on ROCm": ("vllm-rocm-16bit", 16),
    "vLLM on Ascend 910": ("vllm-ascend-910", 128),
    "vLLM on Ascend 310P": ("vllm-ascend-310p", 128),
    "vLLM on MetaX": ("vllm-metax-packed", 256),
    "SGLang, pages of one token": ("sglang-nhd", 1),
    "SGLang, pages of 64": ("sglang-nhd", 64),
    "SGLang on Ascend": ("sglang-ascend", 128),
    "SGLang, AITER": ("sglang-vectorized-5d-16bit", 16),
    "LMDeploy on CUDA": ("lmdeploy-cuda", 64),
    "LMDeploy on MetaX or Ascend": ("lmdeploy-contiguous", 64),
    "LMDeploy on Cambricon": ("lmdeploy-cambricon", 64),
}
"""As their operators start them: a layout of the catalogue and a block size."""

# 1, 2, 3, 4, 18: every engine with every other, whatever the element type, so long as it is one.
SAME_VALUES = [
    Pair(f"1, 2, 3: {a} to {b}, both {dtype}", _kept(*ENGINES[a], dtype), _kept(*ENGINES[b], dtype))
    for a in ENGINES
    for b in ENGINES
    for dtype in ("bfloat16", "float16", "float32")
]

BLOCK_SIZES = [
    Pair(f"2: blocks of {a} and of {b}", {"group.block_size": a}, {"group.block_size": b})
    for a, b in ((16, 128), (128, 16), (64, 128), (48, 80), (1, 256), (256, 1), (17, 3))
]

# What engines keep that does not change what a value means, and what only people read.
HARMLESS = [
    Pair("15: another version of the engine", {"engine_version": "0.31.0"}, {"engine_version": "0.32.1rc1"}),
    Pair("15: another engine", {"engine": "vllm"}, {"engine": "sglang"}),
    Pair("1: another chip", {"chip": "ascend-910b"}, {"chip": "h20"}),
    Pair("11, 14: another generation of one vendor's chip", {"chip": "rtx-5090"}, {"chip": "h20"}),
    Pair(
        "15: names that only people read, in any script",
        {"engine": "引擎", "chip": ""},
        {"engine": "x", "chip": "芯片"},
    ),
]

OTHER_MODEL = [
    Pair(
        "16: another revision of the weights",
        {"model.weights": "sampled:a"},
        {"model.weights": "sampled:b"},
        "model.weights",
    ),
    Pair(
        "16: quantised on one side", {"model.quantization": "none"}, {"model.quantization": "fp8"}, "model.quantization"
    ),
    Pair(
        "16: two quantisations of one checkpoint",
        {"model.quantization": "awq"},
        {"model.quantization": "gptq"},
        "model.quantization",
    ),
    Pair(
        "positions stretched on one side",
        {"model.rope": '{"factor":2,"theta":1e4}'},
        {"model.rope": '{"theta":1e4}'},
        "model.rope",
    ),
    Pair("positions with another base", {"model.rope": '{"theta":1e6}'}, {"model.rope": '{"theta":1e4}'}, "model.rope"),
    Pair("a draft model beside the target", {"model.layers": 32}, {"model.layers": 33}, "model.layers"),
    Pair("a padded vocabulary", {"model.vocabulary": 32000}, {"model.vocabulary": 32064}, "model.vocabulary"),
    Pair(
        "the same sizes in another architecture",
        {"model.architecture": "LlamaForCausalLM"},
        {"model.architecture": "MistralForCausalLM"},
        "model.architecture",
    ),
    Pair(
        "names are compared as they are",
        {"model.architecture": "llamaforcausallm"},
        {"model.architecture": "LlamaForCausalLM"},
        "model.architecture",
    ),
]

SLIDING = {"group.kind": "sliding", "group.window": 4096}

OTHER_CACHE = [
    Pair("layers skipped on one side", {"group.layers": (0, 1, 2)}, {"group.layers": (0, 2)}, "groups[0].layers"),
    Pair("sliding for full", SLIDING, {}, "groups[0].kind"),
    Pair("full for sliding: it has all that is wanted", {}, SLIDING),
    Pair("sliding for sliding", SLIDING, SLIDING),
    Pair("windows of two lengths", SLIDING, SLIDING | {"group.window": 1024}, "groups[0].window"),
    Pair("a window of nothing", SLIDING | {"group.window": 0}, SLIDING | {"group.window": 0}, "groups[0].window"),
    Pair("a kind of a later release", {"group.kind": "tree"}, {"group.kind": "tree"}, "groups[0].kind"),
    Pair("another number of KV heads in all", {"group.heads": 2}, {"group.heads": 4}, "groups[0].heads"),
    Pair("heads of another size", {"group.head_dim": 32}, {"group.head_dim": 64}, "groups[0].head_dim"),
    Pair(
        "the same bytes a token, split another way",
        {"group.heads": 2, "group.head_dim": 64},
        {"group.heads": 4, "group.head_dim": 32},
        "groups[0].heads",
    ),
    Pair("4: a layout that no one can read", {}, {"group.layout": "block token head kv"}, "groups[0].layout"),
    Pair(
        "4: a layout that does not divide its axis",
        {},
        {"group.layout": "block head token/7 token%7 kv dim"},
        "groups[0].layout",
    ),
    Pair(
        "blocks that a packing does not divide",
        {},
        {"group.layout": LAYOUTS["vllm-cpu-amx"], "group.block_size": 24},
        "groups[0].layout",
    ),
]

VECTOR = {"group.head_dim": 576, "group.layout": LAYOUTS["vllm-mla"]}
RECORD = {"group.head_dim": 656, "group.layout": LAYOUTS["vllm-fp8-ds-mla"], "group.dtype": "uint8[fp8_ds_mla]"}

ONE_VECTOR = [
    Pair(
        "latents in one tensor and in two",
        VECTOR,
        VECTOR | {"group.layout": LAYOUTS["vllm-ascend-910-mla"]},
        one_head=True,
    ),
    Pair(
        "latents in pages of one",
        VECTOR,
        VECTOR | {"group.layout": LAYOUTS["sglang-mla"], "group.block_size": 1},
        one_head=True,
    ),
    Pair("latents cut elsewhere", VECTOR, VECTOR | {"group.layout": "dim 448+128 | block token dim"}, one_head=True),
    Pair(
        "latents cut into other sizes",
        VECTOR,
        VECTOR | {"group.layout": "dim 512+32 | block token dim"},
        "groups[0].layout",
        one_head=True,
    ),
    Pair("latents and K/V", VECTOR, VECTOR | {"group.layout": LAYOUTS["vllm-nhd"]}, "groups[0].layout", one_head=True),
    Pair("records", RECORD, RECORD | {"group.block_size": 128}, one_head=True),
    Pair("records and latents", RECORD, VECTOR | {"group.dtype": "bfloat16"}, "groups[0].head_dim", one_head=True),
    Pair("records of another length", RECORD, RECORD | {"group.head_dim": 584}, "groups[0].head_dim", one_head=True),
    Pair(
        "records that nobody knows",
        RECORD | {"group.dtype": "uint8[other]"},
        RECORD | {"group.dtype": "uint8[other]"},
        "groups[0].dtype",
        one_head=True,
    ),
    Pair("bytes without a meaning", {"group.dtype": "uint8"}, {"group.dtype": "uint8"}, "groups[0].dtype"),
]


def _types(about: str, ours: str, theirs: str, exact: bool) -> Pair:
    refused = "" if exact else "groups[0].dtype"
    return Pair(about, {"group.dtype": ours}, {"group.dtype": theirs}, refused, f"{ours}->{theirs}", exact)


OTHER_TYPES = [
    _types("lmdeploy, sglang: bf16 read as fp16 is garbage with status 200", "bfloat16", "float16", False),
    _types("fp16 prefill for a bf16 decode", "float16", "bfloat16", False),
    _types("a chip without bf16 for a CPU", "float16", "float32", True),
    _types("bf16 for a CPU that keeps fp32", "bfloat16", "float32", True),
    _types("fp32 for bf16", "float32", "bfloat16", False),
    _types("fp32 for fp16", "float32", "float16", False),
]


def _scaled(about: str, ours: str, theirs: str, exact: bool, k: float = 1.0, v: float = 1.0) -> Pair:
    """`k` and `v` are the scales of the side that has constants, or of theirs where both have; ours are then 1."""
    scales = [_scales(dtype) for dtype in (ours, theirs)]
    scales[scales[1] is not None] = _scales((ours, theirs)[scales[1] is not None], k, v)
    sides = [{"group.dtype": dtype, "group.scales": each} for dtype, each in zip((ours, theirs), scales, strict=True)]
    refused = "" if exact else "groups[0].scales" if ours == theirs else "groups[0].dtype"
    return Pair(about, sides[0], sides[1], refused, f"{ours}->{theirs}", exact)


def _scales(dtype: str, k: float = 1.0, v: float = 1.0) -> Scales | None:
    if dtype == "int8":
        return Scales("token-head", (), "block token head (kv dim)")
    return Scales("tensor", (k, v) * LAYERS) if dtype.startswith("float8") else None


SCALED_TYPES = [
    _scaled("7: fp8 on one side", "bfloat16", "float8_e4m3fn", False),
    _scaled("7: fp8 on one side, scaled", "bfloat16", "float8_e4m3fn", False, 0.03, 0.4),
    _scaled("7: fp8 read by a bf16 decode", "float8_e4m3fn", "bfloat16", True),
    _scaled("7: fp8 with scales of two", "float8_e4m3fn", "bfloat16", True, 0.25, 4.0),
    _scaled("7: fp8 with scales of no power of two", "float8_e4m3fn", "bfloat16", False, 0.03, 0.4),
    _scaled("7: fp8 with other scales", "float8_e4m3fn", "float8_e4m3fn", False, 1.0, 0.4),
    _scaled("7: fp8 with the same scales", "float8_e4m3fn", "float8_e4m3fn", True),
    _scaled("the two e4m3, equal scales", "float8_e4m3fn", "float8_e4m3fnuz", False),
    _scaled("the two e4m3, the scale doubled", "float8_e4m3fn", "float8_e4m3fnuz", True, 2.0, 2.0),
    _scaled("the two e4m3, the scale of K doubled", "float8_e4m3fn", "float8_e4m3fnuz", False, 2.0, 1.0),
    _scaled("the two e4m3, back", "float8_e4m3fnuz", "float8_e4m3fn", False),
    _scaled(
        "the two e4m3, back with the scale halved: 240 does not fit",
        "float8_e4m3fnuz",
        "float8_e4m3fn",
        False,
        0.5,
        0.5,
    ),
    _scaled("two kinds of fp8", "float8_e5m2", "float8_e4m3fn", False),
    _scaled("int8 with a scale for each token and head", "bfloat16", "int8", False),
    _scaled("int8 for a decode without", "int8", "bfloat16", False),
    _scaled("int8 for int8", "int8", "int8", True),
]

UNSCALED = [
    Pair(f"7: {dtype} whose scales nobody states", {"group.dtype": dtype}, {"group.dtype": dtype}, "groups[0].scales")
    for dtype in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "int8")
]

NO_CAST = [
    Pair("records are never cast", RECORD, RECORD | {"group.dtype": "bfloat16"}, "groups[0].dtype", one_head=True),
    Pair("nothing becomes a record", RECORD | {"group.dtype": "bfloat16"}, RECORD, "groups[0].dtype", one_head=True),
]

ROLES = [
    Pair("prefill to decode", {"role": "prefill"}, {"role": "decode"}),
    Pair("both to both", {"role": "both"}, {"role": "both"}),
    Pair("two prefills", {"role": "prefill"}, {"role": "prefill"}, "role"),
    Pair("two decodes", {"role": "decode"}, {"role": "decode"}, "role"),
    Pair("the wrong way", {"role": "decode"}, {"role": "prefill"}, "role"),
    Pair("a role of a later release", {"role": "encode"}, {"role": "decode"}, "role"),
    Pair("24: an engine and itself", {"role": "both", "epoch": "e"}, {"role": "both", "epoch": "e"}, "epoch"),
]

HERE, THERE = local_address("host.1", "a"), local_address("host.2", "b")

TRANSPORTS = [
    Pair(
        "12, 13: no transport in common",
        {"rank.transports": {"nixl": "x"}},
        {"rank.transports": {"tcp": "h:1"}},
        "transports",
    ),
    Pair("12: none at all", {"rank.transports": {}}, {"rank.transports": {"tcp": "h:1"}}, "transports"),
    Pair(
        "shared memory of two hosts",
        {"rank.transports": {"shm": HERE}},
        {"rank.transports": {"shm": THERE}},
        "transports",
    ),
    Pair(
        "shared memory of two hosts, and tcp",
        {"rank.transports": {"shm": HERE, "tcp": "h:1"}},
        {"rank.transports": {"shm": THERE, "tcp": "h:2"}},
    ),
    Pair("shared memory of one host", {"rank.transports": {"shm": HERE}}, {"rank.transports": {"shm": HERE + "2"}}),
    Pair(
        "13: one that is missing on one side",
        {"rank.transports": {"nixl": "x", "tcp": "h:1"}},
        {"rank.transports": {"tcp": "h:2"}},
    ),
]

# The field an operator should hear about first, where several differ.
SEVERAL = [
    Pair("the role before the model", {"role": "decode", "model.weights": "a"}, {"model.weights": "b"}, "role"),
    Pair(
        "the model before the cache",
        {"model.weights": "a", "group.kind": "x"},
        {"model.weights": "b", "group.kind": "y"},
        "model.weights",
    ),
    Pair(
        "the cache before the transports",
        {"group.kind": "x", "rank.transports": {}},
        {"group.kind": "y"},
        "groups[0].kind",
    ),
]

SETTLED = [
    *SAME_VALUES,
    *BLOCK_SIZES,
    *HARMLESS,
    *OTHER_MODEL,
    *OTHER_CACHE,
    *ONE_VECTOR,
    *NO_CAST,
    *UNSCALED,
    *ROLES,
    *TRANSPORTS,
    *SEVERAL,
]
"""Rows whose answer needs no consent; those of `OTHER_TYPES` and `SCALED_TYPES` that are not exact do."""
