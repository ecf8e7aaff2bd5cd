"""Huawei Ascend. Its bus class is 12 only: the vendor's management chips are display controllers of class 03."""

from __future__ import annotations

from deeplink.chips import output
from deeplink.chips import sources as of
from deeplink.chips.profile import Figure, Link, Named, Pci, Profile, Rates, Served, Tool, Vendor

HALVES = ("bfloat16", "float16")

VENDOR = Vendor(
    name="Huawei Ascend",
    pci=(0x19E5,),
    classes=("12",),
    nodes=r"/dev/davinci\d+",
    tools=(Tool(("npu-smi", "info"), output.npu_smi, of.NOTES, ("/usr/local/sbin",)),),
    sources=(of.PCI_IDS, of.GPUSTACK, of.ZSTACK),
    resource=Named("huawei.com/Ascend910", of.NOTES),
    visible=Named("ASCEND_RT_VISIBLE_DEVICES", of.GPUSTACK),
    control=("/dev/davinci_manager", "/dev/davinci_manager_docker"),
    version_files=(("usr/local/Ascend/driver/version.info", r"(?m)^Version=(\S+)"),),
)

_IMAGE = Named("quay.io/ascend/vllm-ascend", of.VLLM_ASCEND)
_VLLM_HAD = "`pip install vllm-ascend` beside vLLM of the same version, with CANN and torch-npu; or its images"
_SGLANG = Served(
    "SGLang",
    "",
    "SGLang itself, with sgl-kernel-npu, CANN and torch-npu",
    of.SGLANG,
    ("sglang-ascend", "sglang-ascend-mla"),
    (128, 64),
    HALVES,
    image=Named("quay.io/ascend/sglang", of.SGLANG_DOCS),
)
_LMDEPLOY = Served(
    "LMDeploy",
    "dlinfer-ascend",
    "`pip install dlinfer-ascend`: wheels for aarch64 and Python 3.10 and 3.11 only; `--device ascend`",
    of.DLINFER,
    ("lmdeploy-contiguous",),
    (64, 16, 32, 128),
    HALVES,
)
_VLLM = Served(
    "vLLM",
    "vllm-ascend",
    _VLLM_HAD,
    of.VLLM_ASCEND,
    ("vllm-ascend-910", "vllm-ascend-910-mla"),
    (128,),
    HALVES,
    image=_IMAGE,
)

PROFILES = (
    Profile(
        name="ascend-910b",
        title="Ascend 910B",
        vendor=VENDOR,
        models=(r"(ascend ?)?910B[1-4]?C?(-\d)?",),
        pci=(Pci((0xD802,), of.NOTES),),
        served=(_VLLM, _SGLANG, _LMDEPLOY),
        dtypes=("bfloat16", "float16", "int8"),
        dtypes_source=of.FLAGPERF,
        links=(
            Link(
                "HCCS",
                of.UDN_CHART,
                Figure(392, of.UDN_CHART, "press", "the chart does not say in which direction"),
                "per card",
            ),
        ),
        rates=Rates(
            memory_gb=Figure(68.7, of.FLAGPERF, "measured", "64 GiB on an Atlas 800T A2; other bins may have less"),
            measured_bf16_tflops=Figure(304.277, of.FLAGPERF, "measured", "Atlas 800T A2; the bin is not named"),
            measured_int8_tops=Figure(608.554, of.FLAGPERF, "measured", "Atlas 800T A2"),
        ),
        note="Atlas A2. No peak and no memory bandwidth by the vendor was found; press says 0.4, 1.2 and 1.6 TB/s.",
    ),
    Profile(
        name="ascend-910c",
        title="Ascend 910C",
        vendor=VENDOR,
        models=(r"(ascend ?)?910C", r"ascend ?910", r"(ascend ?)?910_93\d\d"),
        pci=(Pci((0xD803,), of.NOTES),),
        served=(_VLLM, _SGLANG, _LMDEPLOY),
        links=(Link("UB", of.CHINA_RESEARCH),),
        rates=Rates(
            bf16_tflops=Figure(752, of.ASCEND_A3_PAPER, "paper, by press", "both dies; press says 780 and 800 too"),
            memory_gb=Figure(128, of.CHINA_RESEARCH, "press", "both dies; npu-smi lists each, with 64 GiB"),
            memory_gbs=Figure(3200, of.TECHPOWERUP, "press", "both dies"),
        ),
        note="Atlas A3: two dies a package, each a device of its own on the bus, in npu-smi and for an engine. "
        "The link is quoted as 196, 392 and 784 GB/s.",
    ),
    Profile(
        name="ascend-310p",
        title="Ascend 310P",
        vendor=VENDOR,
        models=(r"(ascend ?)?310P\d?",),
        pci=(Pci((0xD500,), of.NOTES),),
        served=(
            Served(
                "vLLM",
                "vllm-ascend",
                f"{_VLLM_HAD}; experimental there",
                of.VLLM_ASCEND,
                ("vllm-ascend-310p",),
                (128, 64),
                ("float16",),
                image=_IMAGE,
            ),
        ),
        resource=Named("huawei.com/Ascend310P", of.NOTES),
        note="Atlas 300I. A Duo card is two chips at one address on the bus. LMDeploy refuses any Ascend but the 910.",
    ),
)
