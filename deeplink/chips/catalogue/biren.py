"""Biren. No number of it on the bus has a source: it shows by its device nodes and its tool."""

from __future__ import annotations

from deeplink.chips import output
from deeplink.chips import sources as of
from deeplink.chips.profile import Figure, Link, Named, Profile, Rates, Served, Tool, Vendor

VENDOR = Vendor(
    name="Biren",
    pci=(),
    classes=("03", "12"),
    nodes=r"/dev/biren/card_\d+",
    folder="dev/biren",
    control=("/dev/biren-m",),
    tools=(Tool(("brsmi", "gpu", "--query-gpu=index,name", "--format=csv,noheader"), output.names_csv, of.NOTES),),
    sources=(of.HAMI, of.NOTES),
    resource=Named("birentech.com/gpu", of.HAMI),
)

_UNKNOWN = "the layout is not known"
_SERVED = (
    Served("vLLM", "", "Biren's images (birensupa-smartinfer-vllm)", of.NOTES, note=_UNKNOWN),
    Served("SGLang", "", "Biren's images (birensupa-smartinfer-sglang)", of.NOTES, note=_UNKNOWN),
)

PROFILES = (
    Profile(
        name="biren-br100",
        title="Biren BR100",
        vendor=VENDOR,
        models=(r"(biren|BR) ?100\w?",),
        links=(
            Link("BLink, 8 links", of.HOT_CHIPS_34, Figure(512, of.HOT_CHIPS_34, "vendor, by press"), "8 x 64 GB/s"),
            Link("PCIe 5.0 x16 with CXL, to the host", of.HOT_CHIPS_34),
        ),
        rates=Rates(
            bf16_tflops=Figure(1024, of.HOT_CHIPS_34, "vendor, by press"),
            int8_tops=Figure(2048, of.HOT_CHIPS_34, "vendor, by press"),
            memory_gb=Figure(64, of.HOT_CHIPS_34, "vendor, by press", "HBM2e"),
            memory_gbs=Figure(2300, of.HOT_CHIPS_34, "vendor, by press"),
        ),
        note="Never made in volume; which engine runs on it is not known.",
    ),
    Profile(
        name="biren-br166",
        title="Biren BR166",
        vendor=VENDOR,
        models=(r"(biren|BR) ?166[A-Z]?",),
        served=_SERVED,
        links=(Link("BLink", of.BIREN_SITE),),
        note="Two BR106 dies. An 800 TFLOPS and 128 GB that circulate have no source.",
    ),
)
