"""Enflame."""

from __future__ import annotations

from deeplink.chips import output
from deeplink.chips import sources as of
from deeplink.chips.profile import Figure, Link, Named, Pci, Profile, Rates, Served, Tool, Vendor

VENDOR = Vendor(
    name="Enflame",
    pci=(0x1E36,),
    classes=("03", "12"),
    nodes=r"/dev/gcu\d+",
    tools=(Tool(("efsmi", "-q"), output.efsmi, of.ZSTACK),),
    sources=(of.PCI_IDS, of.ZSTACK, of.NOTES),
    resource=Named("enflame.com/gcu", of.HAMI),
    drivers=("enflame",),
)

PROFILES = (
    Profile(
        name="enflame-s60",
        title="Enflame S60",
        vendor=VENDOR,
        models=(r"(enflame )?S60G?",),
        pci=(Pci((0xC033, 0xC035), of.PCI_IDS),),
        served=(
            Served(
                "vLLM",
                "vllm-gcu",
                "from source, for vLLM 0.9.2, with TopsRider and torch_gcu",
                of.VLLM_GCU,
                ("vllm-rocm-planes-16bit",),
                None,
                ("bfloat16", "float16"),
                "K and V in planes, K in groups of 16 bytes: the same bytes as ROCm's paged attention before 0.32",
            ),
        ),
        dtypes=("bfloat16", "float16", "float32", "int8"),
        dtypes_source=of.MOARK,
        links=(Link("PCIe 5.0 x16, to the host", of.ZSTACK),),
        rates=Rates(memory_gb=Figure(45.1, of.ZSTACK, "read", "42976 MiB in a recorded output of efsmi, ECC on")),
        note="No FP8. No rate was found; press often says 48 GB.",
    ),
)
