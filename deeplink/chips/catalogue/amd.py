"""AMD Instinct. No rate was read from a source, so there is none."""

from __future__ import annotations

from deeplink.chips import output
from deeplink.chips import sources as of
from deeplink.chips.profile import Named, Pci, Profile, Served, Tool, Vendor

VENDOR = Vendor(
    name="AMD",
    pci=(0x1002,),
    classes=("03", "12"),
    drm=True,
    control=("/dev/kfd",),
    tools=(
        Tool(
            ("amd-smi", "static", "--asic", "--bus", "--vram", "--driver", "--json"),
            output.amd_smi,
            of.NOTES,
            ("/opt/rocm/bin",),
        ),
        Tool(
            ("rocm-smi", "--showproductname", "--showbus", "--showmeminfo", "vram", "--json"),
            output.cards_json,
            of.NOTES,
            ("/opt/rocm/bin",),
        ),
    ),
    sources=(of.PCI_IDS, of.GPUSTACK),
    resource=Named("amd.com/gpu", of.GPUSTACK),
    visible=Named("HIP_VISIBLE_DEVICES", of.GPUSTACK),
    drivers=("amdgpu",),
)

_HALVES = ("bfloat16", "float16")
_FLOAT8 = ("float8_e4m3fnuz", "float8_e4m3fn", "float8_e5m2")
SERVED = (
    Served(
        "vLLM",
        "",
        "vLLM's images and wheels for ROCm",
        of.VLLM,
        (
            "vllm-rocm-16bit",
            "vllm-rocm-8bit",
            "vllm-rocm-planes-16bit",
            "vllm-rocm-planes-8bit",
            "vllm-mla",
        ),
        (16, 32),
        (*_HALVES, *_FLOAT8),
        "by attention backend and element size; planes before 0.32 too",
        Named("vllm/vllm-openai-rocm:v0.32.0", of.VLLM_DOCS),
    ),
    Served(
        "SGLang",
        "",
        "SGLang's images for ROCm",
        of.SGLANG,
        ("sglang-nhd", "sglang-vectorized-5d-16bit", "sglang-vectorized-5d-8bit", "sglang-mla"),
        (1, 16, 64),
        (*_HALVES, *_FLOAT8),
        "vectorised with AITER, where SGLANG_AITER_KV_CACHE_LAYOUT says so",
    ),
)


def _instinct(name: str, model: str, *devices: int) -> Profile:
    return Profile(
        name=f"amd-{name}",
        title=f"AMD Instinct {name.upper()}",
        vendor=VENDOR,
        models=(rf"(amd )?(instinct )?{model}( OAM| HF)?",),
        pci=(Pci(devices, of.PCI_IDS),),
        served=SERVED,
    )


PROFILES = (
    _instinct("mi300x", "MI300X", 0x74A1, 0x74A9, 0x74B5, 0x74BD),
    _instinct("mi308x", "MI308X", 0x74A2),
    _instinct("mi325x", "MI325X", 0x74A5, 0x74B9),
    _instinct("mi350x", "MI350X", 0x75A0),
    _instinct("mi355x", "MI355X", 0x75A3),
)
