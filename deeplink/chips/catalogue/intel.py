"""Intel's GPUs for data centres. No rate was read from a source, so there is none; nor what their caches look like."""

from __future__ import annotations

from deeplink.chips import output
from deeplink.chips import sources as of
from deeplink.chips.profile import Named, Pci, Profile, Served, Tool, Vendor

VENDOR = Vendor(
    name="Intel",
    pci=(0x8086,),
    classes=("03",),
    drm=True,
    tools=(Tool(("xpu-smi", "discovery", "-j"), output.xpu_smi, of.XPU_SMI),),
    sources=(of.PCI_IDS, of.XPU_SMI),
    drivers=("xe", "i915"),
)

_SERVED = (
    Served(
        "vLLM",
        "",
        "vLLM's images for XPU, or from source",
        of.VLLM_DOCS,
        note="the layout is not in the catalogue",
        image=Named("vllm/vllm-openai-xpu", of.VLLM_DOCS),
    ),
)


def _gpu(name: str, title: str, model: str, *devices: int) -> Profile:
    return Profile(
        name=f"intel-{name}",
        title=f"Intel {title}",
        vendor=VENDOR,
        models=(rf"(intel(\(R\))? )?{model}",),
        pci=(Pci(devices, of.PCI_IDS),),
        served=_SERVED,
    )


PROFILES = (
    _gpu("max-1550", "Data Center GPU Max 1550", "Data Center GPU Max 1550(VG)?", 0x0BD4, 0x0BD5, 0x0BD6),
    _gpu("max-1100", "Data Center GPU Max 1100", "Data Center GPU Max 1100C?", 0x0B6E, 0x0BD9, 0x0BDA, 0x0BDB),
    _gpu("arc-pro-b60", "Arc Pro B60", r"Arc(\(TM\))? Pro B60( Graphics)?", 0xE211),
)
