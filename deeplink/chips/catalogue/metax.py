"""MetaX."""

from __future__ import annotations

from deeplink.chips import output
from deeplink.chips import sources as of
from deeplink.chips.profile import Figure, Link, Named, Pci, Profile, Rates, Served, Tool, Vendor

HALVES = ("bfloat16", "float16")

VENDOR = Vendor(
    name="MetaX",
    pci=(0x9999,),
    classes=("03", "12"),
    drm=True,
    control=("/dev/mxcd",),
    tools=(Tool(("mx-smi",), output.mx_smi, of.NOTES, ("/opt/mxdriver/bin",)),),
    sources=(of.PCI_IDS, of.GPUSTACK),
    resource=Named("metax-tech.com/gpu", of.GPUSTACK),
    visible=Named("CUDA_VISIBLE_DEVICES", of.GPUSTACK),
    drivers=("metax",),
)

_SERVED = (
    Served(
        "vLLM",
        "vllm-metax",
        "MetaX's images, or from source beside vLLM of the same version; not on a package index",
        of.VLLM_METAX,
        ("vllm-metax-packed", "vllm-kv-in-block"),
        (16, 32, 64, 128, 256),
        HALVES,
        "packed with FlashAttention, K and V in the block with FlashInfer",
        Named("cr.metax-tech.com/public-ai-release/maca/vllm-metax", of.VLLM_METAX),
    ),
    Served(
        "LMDeploy",
        "dlinfer",
        "MetaX's images, or dlinfer from source; `--device maca`",
        of.DLINFER,
        ("lmdeploy-contiguous",),
        (64, 16, 32, 128),
        HALVES,
    ),
)

PROFILES = (
    Profile(
        name="metax-c500",
        title="MetaX C500",
        vendor=VENDOR,
        models=(r"(metax |mx)?C500",),
        pci=(Pci((0x4001,), of.VLLM_MXEXT), Pci((0x0A01,), of.PCI_IDS)),
        served=_SERVED,
        dtypes=HALVES,
        dtypes_source=of.VLLM_METAX,
        links=(Link("MetaXLink", of.METAX_SURVEY), Link("PCIe 5.0 x16, to the host", of.METAX_SURVEY)),
        rates=Rates(memory_gb=Figure(64, of.METAX_SURVEY, "press")),
        note="Peaks of 240 and of 128 TFLOPS circulate; neither has a source.",
    ),
    Profile(
        name="metax-c550",
        title="MetaX C550",
        vendor=VENDOR,
        models=(r"(metax |mx)?C550",),
        pci=(Pci((0x4000,), of.VLLM_MXEXT),),
        served=_SERVED,
        dtypes=HALVES,
        dtypes_source=of.VLLM_METAX,
        links=(Link("MetaXLink", of.METAX_SURVEY),),
        rates=Rates(
            memory_gb=Figure(68.7, of.FLAGPERF, "measured", "64 GiB"),
            memory_gbs=Figure(1800, of.FLAGPERF, "read", "the rating it compares with"),
            measured_memory_gbs=Figure(1390.5, of.FLAGPERF, "measured"),
        ),
        note="FlagPerf reaches 82.8 % of a BF16 rating that it withholds.",
    ),
)
