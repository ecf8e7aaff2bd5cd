"""The cache layouts of known engines. Adding a chip's layout is one entry here; conversion follows from the text.

An entry is a claim about an engine that may change with its next release, so it is a start, not a proof: an engine
plugin proves the layout it declares at start-up, on the live tensors. What no text can say is in docs/layouts.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from deeplink.hookspecs import hookimpl

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
HALVES = ("bfloat16", "float16")

Status = Literal["proven", "read"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One layout of one engine.

    `dtypes` are those the engine keeps with it, `block_sizes` usual ones in tokens, the default first. `status` is
    "proven" where a plugin has proven the layout on a running engine, and "read" where it was read from the engine's
    code. `note` says which strides are wider than dense, or which block is a dummy.
    """

    name: str
    engine: str
    chip: str
    layout: str
    dtypes: tuple[str, ...]
    block_sizes: tuple[int, ...]
    source: str
    status: Status = "read"
    note: str = ""


VLLM = "vLLM 0.32, vllm/v1/kv_cache_layout.py"
VLLM_CPU = "vLLM 0.32, csrc/cpu/cpu_attn*.hpp, measured through ops.cpu_attn_reshape_and_cache"
VLLM_ROCM = "vLLM 0.32, vllm/v1/attention/ops/paged_attn.py and backends/rocm_attn.py"
VLLM_ASCEND = "vllm-ascend, vllm_ascend/attention"
SGLANG = "SGLang 0.5.23, python/sglang/srt/mem_cache/memory_pool.py"
SGLANG_NPU = "SGLang 0.5.23, its NPU memory pools (NPUMHATokenToKVPool, NPUMLATokenToKVPool)"
LMDEPLOY = "LMDeploy 0.18, lmdeploy/pytorch/engine/cache_engine/layout.py"
DLINFER = "LMDeploy 0.18, lmdeploy/pytorch/backends/dlinfer/cache.py"

DUMMY_BLOCK = "block 0 is a dummy"
DUMMY_SLOT = "slot 0 is a dummy, and with pages all of page 0"

ENTRIES = (
    Entry(
        "vllm-nhd",
        "vLLM",
        "CUDA: FlashAttention, Triton, FlashInfer",
        "block token head (kv dim)",
        (*HALVES, *FLOAT8),
        (16, 32, 64, 128),
        VLLM,
        note="physical order LBNHC; BLNHC is the same with a block stride of all layers",
    ),
    Entry(
        "vllm-hnd",
        "vLLM",
        "CUDA: FlashAttention, Triton, FlashInfer",
        "block head token (kv dim)",
        (*HALVES, *FLOAT8),
        (16, 32, 64, 128),
        VLLM,
        note="physical order LBHNC; BLHNC and BHLNC are the same with wider block and head strides",
    ),
    Entry(
        "vllm-head-outermost",
        "vLLM",
        "CUDA: FlashAttention, Triton, FlashInfer",
        "head block token (kv dim)",
        (*HALVES, *FLOAT8),
        (16, 32, 64, 128),
        VLLM,
        note="physical order LHBNC",
    ),
    Entry(
        "vllm-cpu-vec",
        "vLLM",
        "CPU: fp16, fp32, or bf16 without AMX",
        "block head (k: dim token | v: token dim)",
        ("float16", "float32", "bfloat16"),
        (128, 32, 64, 96),
        VLLM_CPU,
        "proven",
    ),
    Entry(
        "vllm-cpu-amx",
        "vLLM",
        "CPU: bf16 with AMX",
        "block head (k: token/16 dim/2 token%16 dim%2 | v: dim/16 token/2 dim%16 token%2)",
        ("bfloat16",),
        (128, 32, 64, 96),
        VLLM_CPU,
        "proven",
    ),
    Entry(
        "vllm-kv-outermost",
        "vLLM before the packed content (RFC 42082), vllm-plugin-FL of December 2025",
        "CUDA and FlagOS: FlashAttention",
        "kv block token head dim",
        (*HALVES, *FLOAT8),
        (16, 32, 64, 128),
        "vLLM 0.1x, vllm/v1/attention/backends/flash_attn.py; vllm-plugin-FL",
    ),
    Entry(
        "vllm-kv-in-block",
        "vLLM before the packed content (RFC 42082), vLLM-metax",
        "CUDA and MACA: FlashInfer",
        "block kv token head dim",
        (*HALVES, *FLOAT8),
        (16, 32, 64),
        "vLLM 0.1x, vllm/v1/attention/backends/flashinfer.py; vLLM-metax",
    ),
    Entry(
        "vllm-rocm-16bit",
        "vLLM",
        "ROCm: paged attention, 16-bit elements",
        "block (k: head dim/8 token dim%8 | v: head dim token)",
        HALVES,
        (16, 32),
        VLLM_ROCM,
    ),
    Entry(
        "vllm-rocm-8bit",
        "vLLM",
        "ROCm: paged attention, 8-bit elements",
        "block (k: head dim/16 token dim%16 | v: head dim token)",
        ("float8_e4m3fnuz", *FLOAT8),
        (16, 32),
        VLLM_ROCM,
    ),
    Entry(
        "vllm-rocm-planes-16bit",
        "vLLM, and before 0.32",
        "ROCm: paged attention with K and V in planes, 16-bit elements",
        "(k: block head dim/8 token dim%8 | v: block head dim token)",
        HALVES,
        (16, 32),
        VLLM_ROCM,
    ),
    Entry(
        "vllm-rocm-planes-8bit",
        "vLLM, and before 0.32",
        "ROCm: paged attention with K and V in planes, 8-bit elements",
        "(k: block head dim/16 token dim%16 | v: block head dim token)",
        ("float8_e4m3fnuz", *FLOAT8),
        (16, 32),
        VLLM_ROCM,
    ),
    Entry(
        "vllm-mla",
        "vLLM",
        "CUDA and ROCm: MLA; CPU: MLA reference",
        "block token dim",
        (*HALVES, *FLOAT8),
        (64, 16, 128),
        VLLM,
        note="dim is latent then rope (512 + 64); one copy on every rank",
    ),
    Entry(
        "vllm-fp8-ds-mla",
        "vLLM",
        "CUDA: FlashMLA sparse (DeepSeek V3.2)",
        "block token dim",
        ("uint8[fp8_ds_mla]",),
        (64,),
        "vLLM 0.32, vllm/v1/attention/backends/mla/flashmla_sparse.py",
        note="one record of 656 bytes a token: 512 fp8, 4 fp32 scales, 64 bf16 rope",
    ),
    Entry(
        "vllm-ascend-910",
        "vllm-ascend",
        "Ascend 910B/C",
        "kv | block token head dim",
        HALVES,
        (128,),
        VLLM_ASCEND,
        note="each tensor is aligned to 2 MiB",
    ),
    Entry(
        "vllm-ascend-910-mla",
        "vllm-ascend",
        "Ascend 910B/C: MLA",
        "dim 512+64 | block token dim",
        HALVES,
        (128,),
        VLLM_ASCEND,
        note="the latent (nope) and the rope cache are separate tensors",
    ),
    Entry(
        "vllm-ascend-310p",
        "vllm-ascend",
        "Ascend 310P",
        "kv block (head dim)/16 token (head dim)%16",
        ("float16",),
        (128,),
        VLLM_ASCEND,
        note="FRACTAL_NZ",
    ),
    Entry(
        "vllm-metax-packed",
        "vLLM-metax",
        "MACA: FlashAttention",
        "block head token (kv dim)",
        HALVES,
        (16, 32, 64, 128, 256),
        "vLLM-metax, its FlashAttention backend",
    ),
    Entry(
        "sglang-nhd",
        "SGLang",
        "CUDA, ROCm, MUSA",
        "kv | slot head dim",
        (*HALVES, *FLOAT8),
        (1, 16, 64, 128),
        SGLANG,
        note=DUMMY_SLOT,
    ),
    Entry(
        "sglang-hnd",
        "SGLang",
        "CUDA: page-major",
        "kv | block head token dim",
        (*HALVES, *FLOAT8),
        (64, 16, 128),
        SGLANG,
        note=DUMMY_BLOCK,
    ),
    Entry(
        "sglang-vectorized-5d-16bit",
        "SGLang",
        "ROCm: AITER, 16-bit elements",
        "kv | (k: block head dim/8 token dim%8 | v: block head token/8 dim token%8)",
        HALVES,
        (16, 64),
        SGLANG,
        note=DUMMY_BLOCK,
    ),
    Entry(
        "sglang-vectorized-5d-8bit",
        "SGLang",
        "ROCm: AITER, 8-bit elements",
        "kv | (k: block head dim/16 token dim%16 | v: block head token/16 dim token%16)",
        ("float8_e4m3fnuz", *FLOAT8),
        (16, 64),
        SGLANG,
        note=DUMMY_BLOCK,
    ),
    Entry(
        "sglang-mla",
        "SGLang",
        "CUDA, ROCm, MUSA: MLA",
        "slot dim",
        (*HALVES, *FLOAT8),
        (1, 32, 64),
        SGLANG,
        note=f"dim is latent then rope (512 + 64); {DUMMY_SLOT}",
    ),
    Entry(
        "sglang-ascend",
        "SGLang",
        "Ascend",
        "kv | block token head dim",
        HALVES,
        (128, 64),
        SGLANG_NPU,
        note=f"{DUMMY_BLOCK}; the layers are one allocation, layer outermost",
    ),
    Entry(
        "sglang-ascend-mla",
        "SGLang",
        "Ascend: MLA",
        "dim 512+64 | block token dim",
        HALVES,
        (128, 64),
        SGLANG_NPU,
        note=f"{DUMMY_BLOCK}; latent and rope are separate tensors",
    ),
    Entry(
        "lmdeploy-cuda",
        "LMDeploy",
        "CUDA",
        "block (k: token head dim | v: token head dim)",
        HALVES,
        (64, 16, 32, 128),
        LMDEPLOY,
        note="K and V are typed views of one byte pool [layer, block, bytes]; padding after V widens the block stride",
    ),
    Entry(
        "lmdeploy-contiguous",
        "LMDeploy",
        "MACA, Ascend",
        "kv | block token head dim",
        HALVES,
        (64, 16, 32, 128),
        DLINFER,
    ),
    Entry(
        "lmdeploy-cambricon",
        "LMDeploy",
        "Cambricon MLU",
        "kv | block head token dim",
        HALVES,
        (64, 16, 32, 128),
        DLINFER,
    ),
)

LAYOUTS = {entry.name: entry.layout for entry in ENTRIES}


@hookimpl
def deeplink_register_layouts(register: Callable[[str, str], None]) -> None:
    for name, text in LAYOUTS.items():
        register(name, text)
