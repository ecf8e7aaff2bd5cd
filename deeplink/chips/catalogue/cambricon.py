"""Cambricon MLU."""

from __future__ import annotations

from deeplink.chips import output
from deeplink.chips import sources as of
from deeplink.chips.profile import Named, Pci, Profile, Served, Tool, Vendor

VENDOR = Vendor(
    name="Cambricon",
    pci=(0xCABC,),
    classes=("03", "12"),
    nodes=r"/dev/cambricon_dev\d+",
    control=("/dev/cambricon_ctl",),
    tools=(Tool(("cnmon",), output.cnmon, of.NOTES),),
    sources=(of.PCI_IDS, of.GPUSTACK, of.NOTES),
    resource=Named("cambricon.com/mlu", of.GPUSTACK),
    visible=Named("MLU_VISIBLE_DEVICES", of.GPUSTACK),
)

_SERVED = (
    Served(
        "vLLM",
        "vllm-mlu",
        "from source, inside the Cambricon PyTorch container",
        of.VLLM_MLU,
        note="`kv block head token dim`, K and V outermost in one tensor, which is not in the catalogue yet",
    ),
    Served(
        "LMDeploy",
        "dlinfer",
        "Cambricon's images, or dlinfer from source; `--device camb`",
        of.DLINFER,
        ("lmdeploy-cambricon",),
        (64, 16, 32, 128),
        ("bfloat16", "float16"),
    ),
)

PROFILES = (
    Profile(
        name="cambricon-mlu370",
        title="Cambricon MLU370",
        vendor=VENDOR,
        models=(r"MLU370(-\w+)?",),
        pci=(Pci((0x0370,), of.PCI_IDS),),
        served=_SERVED,
    ),
    Profile(
        name="cambricon-mlu590",
        title="Cambricon MLU590",
        vendor=VENDOR,
        models=(r"MLU590(-\w+)?",),
        served=_SERVED,
        note="Its number on the bus was not found.",
    ),
)
