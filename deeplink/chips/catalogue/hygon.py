"""Hygon DCU. Older drivers have AMD's control node, so without a PCI tree those look like AMD."""

from __future__ import annotations

from deeplink.chips import output
from deeplink.chips import sources as of
from deeplink.chips.profile import Figure, Named, Pci, Profile, Rates, Served, Tool, Vendor

VENDOR = Vendor(
    name="Hygon",
    pci=(0x1D94,),
    classes=("03", "12"),
    drm=True,
    control=("/dev/mkfd",),
    tools=(
        Tool(
            ("hy-smi", "--showproductname", "--showbus", "--showmeminfo", "vram", "--json"),
            output.cards_json,
            of.NOTES,
            ("/opt/hyhal/bin",),
        ),
    ),
    sources=(of.PCI_IDS, of.GPUSTACK),
    resource=Named("hygon.com/dcu", of.GPUSTACK),
    visible=Named("HIP_VISIBLE_DEVICES", of.GPUSTACK),
    drivers=("hycu", "hydcu"),
)

_SERVED = (
    Served(
        "vLLM",
        "vllm-plugin-das",
        "Hygon's images, or from source, beside vLLM 0.28",
        of.VLLM_HCU,
        note="NHD or HND of vLLM 0.28's layouts, as that resolves them; which backend keeps which is not known",
    ),
    Served("SGLang", "", "Hygon's images (0.5.12)", of.ONE_NOTE, note="the layout is not known"),
)

PROFILES = (
    Profile(
        name="hygon-k100-ai",
        title="Hygon K100_AI",
        vendor=VENDOR,
        models=(r"K100_AI",),
        pci=(Pci((0x6210,), of.NOTES),),
        served=_SERVED,
        rates=Rates(memory_gb=Figure(64, of.SJTU, "secondary")),
        note="180, 192 and 196 TFLOPS, and 896 GB/s and 1.2 TB/s, are quoted; no sheet of the vendor was found.",
    ),
    Profile(
        name="hygon-bw1000",
        title="Hygon BW1000",
        vendor=VENDOR,
        models=(r"BW1000",),
        served=_SERVED,
        note="The BW150 has the same number on the bus (0x6320), and hy-smi calls both BW: neither says which it is. "
        "No figure was found that others do not contradict.",
    ),
)
