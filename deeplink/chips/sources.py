"""Where the facts of the catalogue were read, in 2026-11 where no version is said."""

from __future__ import annotations

from deeplink.chips.profile import Source

PCI_IDS = Source("pci.ids", "pciutils/pciids @ c1c1254, pci.ids (2026-08-22)", "BSD-3-Clause or GPL-2.0-or-later")
FLAGPERF = Source("FlagPerf", "FlagOpen/FlagPerf @ 1b5a030, base/benchmarks/*/*/README.md", "Apache-2.0")
AICONFIGURATOR = Source("aiconfigurator", "ai-dynamo/aiconfigurator, systems/*.yaml (kept by NVIDIA)", "Apache-2.0")
GPUSTACK = Source(
    "gpustack-runtime", "gpustack/runtime @ 88026d6, gpustack_runtime/detector, its samples, envs.py", "Apache-2.0"
)
HAMI = Source("HAMi", "Project-HAMi/HAMi @ 4707fb0, docs/develop/roadmap.md and pkg/device", "Apache-2.0")
ZSTACK = Source("zstack-utility", "zstackio/zstack-utility, zstacklib/zstacklib/gpu and its tests")
NOTES = Source("public notes", "deployment notes and parsers in several public repositories, each fact in two or more")
ONE_NOTE = Source("a public note", "one public repository each; not confirmed elsewhere")

ASCEND_A3_PAPER = Source("CloudMatrix384 paper", "arXiv 2506.12708, as summarised by reportify.ai 688413268697636")
TECHPOWERUP = Source("TechPowerUp", "techpowerup.com/335749")
CHINA_RESEARCH = Source("China Research Collective", "its post on CloudMatrix384 (about 48 TB of HBM over 384 chips)")
UDN_CHART = Source("udn.com 9013137", "udn.com/news/story/7333/9013137 (a chart shown by CCTV, 2025-09-16)")
UDN_THEAD = Source("udn.com 9297647", "udn.com/news/story/7333/9297647 (T-Head's site, 2026-01-30)")
METAX_SURVEY = Source("metax-tech.com", "metax-tech.com prod.html?cid=107&id=21, as cited by a survey")
HOT_CHIPS_34 = Source("Hot Chips 34", "deck HC2022.BirenTech, as reported by masterbitzreviewhn and clickthis.blog")
BIREN_SITE = Source("birentech.com", "birentech.com/product/hardware/166m")
SJTU = Source("SJTU HPC", "documentation of SJTU's clusters, where a device is named K100_AI-64GB")
ITBEAR = Source("itbear.com.cn", "m.itbear.com.cn 2025-12/1060774 (figures of the prospectus)")
IO_TECH = Source("io-tech.fi", "io-tech.fi, report of the MTT S4000's launch")
REPORTIFY_S5000 = Source("reportify.ai", "reportify.ai, 2026-02-14, on the MTT S5000")
LDEEPAI = Source("ldeepai.com", "ldeepai.com, on the MTT S5000")
MOARK = Source("moark.com", "moark.com, its list of operators on the S60")
BROKERAGE = Source("brokerage tables", "tables in brokers' reports on Iluvatar CoreX")
WILLITRUNAI = Source("willitrunai.com", "willitrunai.com/es/gpus/h20-96gb")

VLLM = Source("vLLM 0.32", "vllm/v1/kv_cache_layout.py, vllm/v1/attention/ops/paged_attn.py", "Apache-2.0")
VLLM_CPU = Source(
    "vLLM 0.32 for CPUs", "csrc/cpu/cpu_attn*.hpp, measured through its cache-write operation", "Apache-2.0"
)
VLLM_DOCS = Source("vLLM's documentation", "docs.vllm.ai, getting_started/installation (0.11.2: hardware plugins)")
VLLM_ASCEND = Source(
    "vllm-ascend", "vllm-project/vllm-ascend @ 182b75e, README.md, device, attention, _310p", "Apache-2.0"
)
VLLM_METAX = Source("vLLM-metax", "MetaX-MACA/vLLM-metax @ 3aadf08, README.md, v1/attention/backends", "Apache-2.0")
VLLM_MUSA = Source(
    "vllm-musa", "MooreThreads/vllm-musa, README.md and docs/installation.md (v0.28.0-dev)", "Apache-2.0"
)
VLLM_GCU = Source(
    "vllm-gcu", "EnflameTechnology/vllm-gcu @ 7b5aaca, ReadMe-EN.md, attention/ops/paged_attn.py", "Apache-2.0"
)
VLLM_MLU = Source("vllm-mlu", "Cambricon/vllm-mlu, README.md, v1/attention/backends/flash_attn.py", "Apache-2.0")
VLLM_HCU = Source("vllm-plugin-das", "HYGON-AI/vllm-plugin-das, README.md, vllm_hcu/v1/attention", "Apache-2.0")
VLLM_FL = Source("vllm-plugin-FL", "flagos-ai/vllm-plugin-FL, README.md (main, for vLLM 0.28.0)")
VLLM_MXEXT = Source("vllm_mxext", "Hodoryu/vllm_mxext, hub/hardware_inspect.py")
SGLANG = Source("SGLang 0.5.23", "python/sglang/srt/mem_cache/memory_pool.py", "Apache-2.0")
SGLANG_DOCS = Source("SGLang's documentation", "docs.sglang.io, get-started/install, hardware-platforms/ascend-npus")
LMDEPLOY = Source("LMDeploy 0.18", "lmdeploy/pytorch/engine/cache_engine/layout.py", "Apache-2.0")
LMDEPLOY_DOCS = Source("LMDeploy's documentation", "docs/en/llm/api_server.md of InternLM/lmdeploy @ 08ae7fd")
DLINFER = Source(
    "dlinfer", "LMDeploy 0.18, lmdeploy/pytorch/backends/dlinfer; dlinfer-ascend 0.2.7", "Apache-2.0 (LMDeploy)"
)
DLROUTER = Source("DLRouter", "DLRouter, docs/heterogeneous-ppu-maca-lmdeploy.md")
XPU_SMI = Source("xpumanager", "intel/xpumanager, its guide to xpu-smi", "MIT")
KERNEL = Source("Linux", "Documentation of sysfs, and the flags in /proc/cpuinfo (arch/x86/include/asm/cpufeatures.h)")
