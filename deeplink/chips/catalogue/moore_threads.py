"""Moore Threads."""

from __future__ import annotations

from deeplink.chips import output
from deeplink.chips import sources as of
from deeplink.chips.profile import Figure, Link, Named, Pci, Profile, Rates, Served, Tool, Vendor

VENDOR = Vendor(
    name="Moore Threads",
    pci=(0x1ED5,),
    classes=("03", "12"),
    nodes=r"/dev/mtgpu\.?\d+",
    tools=(Tool(("mthreads-gmi", "--query", "--json"), output.mthreads_gmi, of.NOTES),),
    sources=(of.PCI_IDS, of.GPUSTACK, of.NOTES),
    resource=Named("mthreads.com/gpu", of.GPUSTACK),
    visible=Named("MUSA_VISIBLE_DEVICES", of.GPUSTACK),
    drivers=("mtgpu",),
)

_SGLANG = Served("SGLang", "", "SGLang itself, with torch_musa", of.SGLANG, ("sglang-nhd", "sglang-mla"), (1, 16, 64))
_VLLM = Served(
    "vLLM",
    "vllm-musa",
    "Moore Threads' images, or from source (x86_64, Python 3.10), its wheels from Moore Threads' own index",
    of.VLLM_MUSA,
    note="the layout is not known",
)

PROFILES = (
    Profile(
        name="mthreads-s4000",
        title="Moore Threads MTT S4000",
        vendor=VENDOR,
        models=(r"MTT ?S4000",),
        pci=(Pci((0x0323, 0x0327, 0x0328), of.PCI_IDS),),
        served=(_VLLM, _SGLANG),
        links=(
            Link("MTLink 1.0", of.IO_TECH, Figure(240, of.IO_TECH, "vendor, by press"), "per card"),
            Link("PCIe 5.0 x16, to the host", of.IO_TECH),
        ),
        rates=Rates(
            bf16_tflops=Figure(
                98, of.ITBEAR, "vendor, by press", "the prospectus'; at its launch it was rounded to 100"
            ),
            int8_tops=Figure(196, of.ITBEAR, "vendor, by press"),
            memory_gb=Figure(48, of.IO_TECH, "vendor, by press", "GDDR6"),
            memory_gbs=Figure(768, of.IO_TECH, "vendor, by press"),
        ),
        note="No FP8.",
    ),
    Profile(
        name="mthreads-s5000",
        title="Moore Threads MTT S5000",
        vendor=VENDOR,
        models=(r"MTT ?S5000",),
        pci=(Pci((0x0400,), of.ONE_NOTE),),
        served=(_VLLM, _SGLANG),
        links=(Link("MTLink", of.LDEEPAI, Figure(784, of.LDEEPAI, "vendor, by press"), "per card"),),
        rates=Rates(
            fp8_tflops=Figure(1000, of.REPORTIFY_S5000, "vendor, by press", "liquid; 920 with air"),
            memory_gb=Figure(80, of.REPORTIFY_S5000, "vendor, by press"),
            memory_gbs=Figure(1600, of.REPORTIFY_S5000, "vendor, by press"),
        ),
        note="The rate in BF16 is not published.",
    ),
)
