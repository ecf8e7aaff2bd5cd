"""Processors, by what their flags say. The first that fits is meant, so the one with more of them comes first."""

from __future__ import annotations

from deeplink.chips import sources as of
from deeplink.chips.profile import Named, Profile, Served

_HAD = "vLLM's builds for CPUs"
_IMAGE = Named("vllm/vllm-openai-cpu:v0.32.0", of.VLLM_DOCS)
_SIZES = (128, 32, 64, 96)
_HALVES = ("bfloat16", "float16")
_FLOATS = (*_HALVES, "float32")
_SGLANG = Served(
    "SGLang",
    "",
    "SGLang itself, with its kernels for CPUs built from source",
    of.SGLANG,
    ("sglang-nhd",),
    (1, 16, 64, 128),
    _HALVES,
    "tested with functions of torch in place of the kernels, in float32 too",
)
_LMDEPLOY = Served(
    "LMDeploy",
    "deeplink",
    "`pip install lmdeploy`, and `deeplink serve lmdeploy`",
    of.LMDEPLOY,
    ("lmdeploy-cuda",),
    (64, 16, 32, 128),
    _HALVES,
    "computed by the vendor *reference*",
)

PROFILES = (
    Profile(
        name="cpu-x86-amx",
        title="CPU, x86 with AMX",
        vendor=None,
        served=(
            Served(
                "vLLM",
                "",
                _HAD,
                of.VLLM_CPU,
                ("vllm-cpu-amx", "vllm-cpu-vec"),
                _SIZES,
                _FLOATS,
                "bf16 is packed for AMX, fp16 and fp32 are not",
                _IMAGE,
            ),
            _SGLANG,
            _LMDEPLOY,
        ),
        dtypes=("bfloat16", "float16", "float32", "int8"),
        dtypes_source=of.KERNEL,
        cpu=("x86", "amx_tile", "amx_bf16"),
        note="Rates are to be measured on the host: no general figure means anything.",
    ),
    Profile(
        name="cpu-x86",
        title="CPU, x86",
        vendor=None,
        served=(
            Served(
                "vLLM",
                "",
                _HAD,
                of.VLLM_CPU,
                ("vllm-cpu-vec",),
                _SIZES,
                _FLOATS,
                image=_IMAGE,
            ),
            _SGLANG,
            _LMDEPLOY,
        ),
        cpu=("x86",),
        note="Rates are to be measured on the host.",
    ),
    Profile(
        name="cpu-arm",
        title="CPU, Arm",
        vendor=None,
        served=(Served("vLLM", "", _HAD, of.VLLM_CPU, note="its packing for NEON is not known", image=_IMAGE),),
        cpu=("arm",),
        note="Rates are to be measured on the host.",
    ),
)
