"""NVIDIA. The rates are NVIDIA's own, as aiconfigurator keeps them. One name may be several chips: SXM and PCIe."""

from __future__ import annotations

from deeplink.chips import output
from deeplink.chips import sources as of
from deeplink.chips.profile import Figure, Link, Named, Pci, Profile, Rates, Served, Source, Tool, Vendor

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
HALVES = ("bfloat16", "float16")

VENDOR = Vendor(
    name="NVIDIA",
    pci=(0x10DE,),
    classes=("03",),
    nodes=r"/dev/nvidia\d+",
    control=("/dev/nvidiactl",),
    tools=(
        Tool(
            ("nvidia-smi", "--query-gpu=pci.bus_id,name,memory.total,driver_version", "--format=csv,noheader,nounits"),
            output.query_csv,
            of.NOTES,
        ),
    ),
    sources=(of.PCI_IDS, of.GPUSTACK),
    resource=Named("nvidia.com/gpu", of.GPUSTACK),
    visible=Named("CUDA_VISIBLE_DEVICES", of.GPUSTACK),
    drivers=("nvidia",),
)

SERVED = (
    Served(
        "vLLM",
        "",
        "`pip install vllm`",
        of.VLLM,
        ("vllm-nhd", "vllm-hnd", "vllm-head-outermost", "vllm-mla", "vllm-fp8-ds-mla", "vllm-kv-outermost"),
        (16, 32, 64, 128),
        (*HALVES, *FLOAT8, "uint8[fp8_ds_mla]"),
        "by attention backend and VLLM_KV_CACHE_LAYOUT; K and V outermost before RFC 42082",
        Named("vllm/vllm-openai:v0.32.0", of.VLLM_DOCS),
    ),
    Served(
        "SGLang",
        "",
        "`pip install sglang`",
        of.SGLANG,
        ("sglang-nhd", "sglang-hnd", "sglang-mla"),
        (1, 16, 64, 128),
        (*HALVES, *FLOAT8),
        image=Named("lmsysorg/sglang", of.SGLANG_DOCS),
    ),
    Served(
        "LMDeploy",
        "",
        "`pip install lmdeploy`",
        of.LMDEPLOY,
        ("lmdeploy-cuda",),
        (64, 16, 32, 128),
        HALVES,
        image=Named("openmmlab/lmdeploy", of.LMDEPLOY_DOCS),
    ),
)


def _rated(source: Source, bf16: float, int8: float, fp8: float | None, gb: float, gbs: float) -> Rates:
    def figure(value: float) -> Figure:
        return Figure(value, source, "vendor" if source is of.AICONFIGURATOR else "press")

    return Rates(figure(bf16), figure(int8), None if fp8 is None else figure(fp8), figure(gb), figure(gbs))


def _nvlink(name: str, gbs: float, source: Source = of.AICONFIGURATOR, counted: str = "one direction") -> Link:
    return Link(name, source, Figure(gbs, source, "vendor" if source is of.AICONFIGURATOR else "press"), counted)


PROFILES = (
    Profile(
        name="nvidia-a100-sxm-80gb",
        title="NVIDIA A100 SXM 80GB",
        vendor=VENDOR,
        models=(r"(nvidia )?A100-SXM4?-80GB",),
        pci=(Pci((0x20B2,), of.PCI_IDS),),
        served=SERVED,
        links=(_nvlink("NVLink 3", 300), Link("PCIe 4.0 x16, to the host", of.AICONFIGURATOR)),
        rates=_rated(of.AICONFIGURATOR, 312, 624, None, 80, 2039),
    ),
    Profile(
        name="nvidia-h100-sxm",
        title="NVIDIA H100 SXM",
        vendor=VENDOR,
        models=(r"(nvidia )?H100 80GB HBM3",),
        pci=(Pci((0x2330,), of.PCI_IDS),),
        served=SERVED,
        links=(_nvlink("NVLink 4", 450), Link("PCIe 5.0 x16, to the host", of.AICONFIGURATOR)),
        rates=_rated(of.AICONFIGURATOR, 989, 1978, 1978, 80, 3350),
    ),
    Profile(
        name="nvidia-h200-sxm",
        title="NVIDIA H200 SXM",
        vendor=VENDOR,
        models=(r"(nvidia )?H200",),
        pci=(Pci((0x2335,), of.PCI_IDS),),
        served=SERVED,
        links=(_nvlink("NVLink 4", 450), Link("PCIe 5.0 x16, to the host", of.AICONFIGURATOR)),
        rates=_rated(of.AICONFIGURATOR, 989, 1978, 1978, 141, 4800),
    ),
    Profile(
        name="nvidia-l40s",
        title="NVIDIA L40S",
        vendor=VENDOR,
        models=(r"(nvidia )?L40S",),
        pci=(Pci((0x26B9,), of.PCI_IDS),),
        served=SERVED,
        links=(_nvlink("PCIe 4.0 x16", 32),),
        rates=_rated(of.AICONFIGURATOR, 362, 733, 733, 48, 864),
        note="No NVLink.",
    ),
    Profile(
        name="nvidia-h20",
        title="NVIDIA H20",
        vendor=VENDOR,
        models=(r"(nvidia )?H20",),
        pci=(Pci((0x2329,), of.PCI_IDS),),
        served=SERVED,
        links=(_nvlink("NVLink 4", 900, of.WILLITRUNAI, "both directions"),),
        rates=_rated(of.WILLITRUNAI, 148, 296, None, 96, 4000),
        note="The 141 GB variant (HBM3e) has another number on the bus, and no profile.",
    ),
)
