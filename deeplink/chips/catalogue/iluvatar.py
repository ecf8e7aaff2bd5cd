"""Iluvatar CoreX."""

from __future__ import annotations

from deeplink.chips import output
from deeplink.chips import sources as of
from deeplink.chips.profile import Figure, Link, Named, Profile, Rates, Served, Tool, Vendor

VENDOR = Vendor(
    name="Iluvatar CoreX",
    pci=(0x1E3E,),
    classes=("03", "12"),
    nodes=r"/dev/iluvatar\d+",
    tools=(
        Tool(
            ("ixsmi", "--query-gpu=pci.bus_id,name,memory.total,driver_version", "--format=csv,noheader,nounits"),
            output.query_csv,
            of.NOTES,
            ("/usr/local/corex/bin",),
        ),
    ),
    sources=(of.PCI_IDS, of.GPUSTACK, of.ZSTACK),
    resource=Named("iluvatar.com/gpu", of.GPUSTACK),
    visible=Named("CUDA_VISIBLE_DEVICES", of.GPUSTACK),
    control=("/dev/itrctl",),
    drivers=("iluvatar",),
)

PROFILES = (
    Profile(
        name="iluvatar-bi-v150",
        title="Iluvatar BI-V150 (Tiangai 150)",
        vendor=VENDOR,
        models=(r"(iluvatar )?BI-?V?150S?( OAM)?",),
        served=(
            Served(
                "vLLM",
                "vllm_iluvatar",
                "Iluvatar's images; vllm-plugin-FL from source supports it too",
                of.VLLM_FL,
                note="the layout is not known",
            ),
        ),
        dtypes=("bfloat16", "float16", "float32"),
        dtypes_source=of.FLAGPERF,
        links=(
            Link(
                "8 cards of a machine",
                of.FLAGPERF,
                Figure(92.48, of.FLAGPERF, "measured"),
                "as an all-reduce counts it",
            ),
        ),
        rates=Rates(
            bf16_tflops=Figure(192, of.BROKERAGE, "press", "less than was measured, so not exact"),
            int8_tops=Figure(384, of.BROKERAGE, "press"),
            memory_gb=Figure(
                68.34, of.FLAGPERF, "measured", "63.66 GiB; a board is two chips, each a device of 32 GiB"
            ),
            measured_bf16_tflops=Figure(196.77, of.FLAGPERF, "measured"),
            measured_memory_gbs=Figure(590.01, of.FLAGPERF, "measured"),
        ),
        note="1.6 and 1.8 TB/s and 896 GB/s are quoted, 590 GB/s was measured: none is given as the rated one. "
        "Its number on the bus was not found.",
    ),
)
