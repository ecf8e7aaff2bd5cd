"""Alibaba's T-Head. The bus number is Alibaba's; that of the PPU itself was not found."""

from __future__ import annotations

from deeplink.chips import output
from deeplink.chips import sources as of
from deeplink.chips.profile import Figure, Link, Named, Profile, Rates, Served, Tool, Vendor

VENDOR = Vendor(
    name="Alibaba T-Head",
    pci=(0x1DED,),
    classes=("03", "12"),
    nodes=r"/dev/alixpu_ppu\d+",
    tools=(
        Tool(
            ("ppu-smi", "--query-gpu=pci.bus_id,name,memory.total,driver_version", "--format=csv,noheader,nounits"),
            output.query_csv,
            of.NOTES,
        ),
    ),
    sources=(of.PCI_IDS, of.GPUSTACK),
    resource=Named("alibabacloud.com/ppu", of.GPUSTACK),
    visible=Named("CUDA_VISIBLE_DEVICES", of.GPUSTACK),
    control=("/dev/alixpu", "/dev/alixpu_ctl"),
)

PROFILES = (
    Profile(
        name="thead-ppu-zw810e",
        title="T-Head PPU (Zhenwu 810E)",
        vendor=VENDOR,
        models=(r"PPU-ZW810E?",),
        served=(
            Served(
                "vLLM",
                "",
                "T-Head's images, whose torch is one for CUDA; vllm-plugin-FL from source supports it too",
                of.VLLM_FL,
                note="the layout of the images' vLLM is not known",
            ),
            Served(
                "LMDeploy",
                "",
                "T-Head's images (LMDeploy 0.10.0); `--device cuda`",
                of.DLROUTER,
                note="one cache each for K and V before 0.18; the later layout for CUDA is another",
            ),
        ),
        links=(
            Link("ICN, 7 links", of.UDN_THEAD, Figure(700, of.UDN_THEAD, "vendor, by press"), "per card, all links"),
            Link("PCIe 5.0 x16, to the host", of.UDN_THEAD),
        ),
        rates=Rates(memory_gb=Figure(96, of.UDN_THEAD, "vendor, by press", "HBM2e; the tool says 98304 MiB")),
        note="No rate of computing or of memory is published.",
    ),
)
