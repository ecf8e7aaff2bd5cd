"""Times of dense models as they were served on H100 and H200, predicted from those of other models.

A run keeps `c` requests at a time going, of which as many are in a step as the cache has room for. A token takes a
decode step, plus its share of the prompts that are prefilled meanwhile: in as many steps as an answer has tokens, all
requests of a step end, and as many are begun. (`silicon_ttft.py` replays the requests instead, with the same rates.)
The step and the prefill are the solver's roofline with the reached fractions of the peaks, the time of a layer, the
time of a sequence and what two chips have to tell each other in every layer. These nine numbers are fitted to all runs
of two models, with a pull towards round values, and predict the third; `pattern` is a deterministic search.
"""

from __future__ import annotations

import csv
import gzip
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deeplink.solver.estimates import catalogue
from deeplink.solver.estimates import model as models
from deeplink.solver.estimates.model import Model

TABLE = Path(__file__).with_name("data") / "silicon_dense_hopper.csv.gz"
_LLAMA = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "vocab_size": 128256}
CONFIGS = {
    "Llama-3.1-8B": {
        **_LLAMA,
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "Llama-3.1-70B": {
        **_LLAMA,
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "Qwen3-32B": {
        "architectures": ["Qwen3ForCausalLM"],
        "torch_dtype": "bfloat16",
        "vocab_size": 151936,
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
CHIPS = {"h100_sxm": "NVIDIA H100 SXM", "h200_sxm": "NVIDIA H200 SXM"}
ROUND = (0.8, 0.8, 0.6, 3e-5, 1e-5, 0.5, 5e-6, 0.8, 0.6)
"""Reached parts of memory for weights, for cache, and of compute in decode; seconds of a layer and of a sequence;
reached part of the link, seconds of an all-reduce; which part of a prefill delays decode; reached compute there."""
_MOST = (1.0, 1.0, 1.0, 1e-3, 1e-3, 1.0, 1e-3, 1.5, 1.0)
_PULL = 0.01
USED = 0.9
"""Part of a chip's memory that weights and cache take."""
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Run:
    model: str
    engine: str
    fp8: bool
    chip: str
    prompt: int
    output: int
    together: int
    tp: int
    ttft: float
    tpot: float
    inferencex: bool
    """Whether InferenceX measured it, and not those who made aiconfigurator."""

    @property
    def cache_dtype(self) -> str:
        """As InferenceX asks for it (its `benchmarks/70b_fp8_*.sh`); others do not."""
        return "float8_e4m3fn" if self.inferencex else "bfloat16"


def runs() -> list[Run]:
    """All whose number of requests at a time is known."""
    found = []
    with gzip.open(TABLE, "rt", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if not row["concurrency"]:
                continue
            name = next(name for name in CONFIGS if name.rpartition("-")[2] in row["model_path"])
            found.append(
                Run(
                    name,
                    row["backend"],
                    row["gemm_quant_mode"].startswith("fp8"),
                    CHIPS[row["system"]],
                    int(row["isl"]),
                    int(row["osl"]),
                    int(row["concurrency"]),
                    int(row["tp_size"]),
                    float(row["silicon_ttft_ms"]) / 1e3,
                    float(row["silicon_tpot_ms"]) / 1e3,
                    not row["backend_version"],
                )
            )
    return found


def features(run: Run) -> list[float]:
    """Seconds at the peaks: weights, cache, decode's operations, all-reduces of decode; layers; prefill's operations
    and all-reduces; requests at a time, tokens of an answer, all-reduces."""
    shape, chip, tp = _model(run.model, run.fp8), catalogue.chip(run.chip), run.tp
    together, prompt = fits(run), run.prompt
    context = prompt + run.output / 2
    told = shape.layers * 2 * shape.hidden * 2.0 * 2 * (tp - 1) / tp / chip.link
    head = shape.hidden * CONFIGS[run.model]["vocab_size"]
    prefill = 2 * (shape.active - head) * prompt / chip.peak(shape.bits)
    return [
        shape.read_bytes(together) / tp / chip.bandwidth,
        together * context * shape.kv_bytes(run.cache_dtype) / min(tp, shape.kv_heads) / chip.bandwidth,
        2 * shape.active * together / tp / chip.peak(shape.bits),
        told * together,
        float(shape.layers),
        prefill / tp + attention(run),
        told * prompt,
        float(together),
        float(run.output),
        float(shape.layers * (tp > 1)),
    ]


def fits(run: Run) -> float:
    """How many of the requests have their cache on the chips at a time."""
    return min(float(run.together), max(room(run) / (run.prompt + run.output / 2), 1.0))


def room(run: Run) -> float:
    """Tokens whose cache the chips hold."""
    shape, chip = _model(run.model, run.fp8), catalogue.chip(run.chip)
    left = chip.memory * run.tp * USED - shape.weight_bytes
    if run.engine == "trtllm":  # takes its part of what the weights leave
        left = (chip.memory * run.tp - shape.weight_bytes) * USED
    # TensorRT-LLM also keeps a cache of 8 bits beside weights of 8 bits, which it does not read any faster.
    dtype = "float8_e4m3fn" if run.fp8 and run.engine == "trtllm" else run.cache_dtype
    return left / (shape.kv_bytes(dtype) * max(run.tp / shape.kv_heads, 1.0))


def attention(run: Run) -> float:
    """Seconds of a prompt's attention at the peak."""
    shape, chip = _model(run.model, run.fp8), catalogue.chip(run.chip)
    return shape.attention_flops(run.prompt, (run.prompt + 1) / 2) / chip.peak(16) / run.tp


def step(numbers: Array, of: Array) -> Array:
    """Seconds of a decode step in which nothing is prefilled."""
    weights, cache, flops, told, layers, _, _, together, _, reduces = of.T
    memory, kv, compute, layer, sequence, link, reduce, _, _ = numbers
    kernels = np.maximum(weights / memory + cache / kv, flops / compute)
    found: Array = kernels + layers * layer + together * sequence + reduces * reduce + told / link
    return found


def tpot(numbers: Array, of: Array) -> Array:
    together, output = of[:, 7], of[:, 8]
    found: Array = step(numbers, of) + numbers[7] * together / output * prefill(numbers, of)
    return found


def prefill(numbers: Array, of: Array) -> Array:
    found: Array = of[:, 5] / numbers[8] + of[:, 6] / numbers[5]
    return found


def fit(of: Array, seconds: Array) -> Array:
    start = np.log(np.asarray(ROUND))

    def loss(logs: Array) -> float:
        if (np.exp(logs) > _MOST).any():
            return math.inf
        off = np.abs(np.log(tpot(np.exp(logs), of) / seconds)).mean()
        return float(off + _PULL * ((logs - start) ** 2).sum())

    return np.exp(pattern(loss, start))


def pattern(loss: Callable[[Array], float], start: Array) -> Array:
    """Along one axis after the other, with steps that shrink when none helps."""
    best, least, size = start.copy(), loss(start), 0.5
    while size > 0.01:
        helped = False
        for axis in range(len(best)):
            for step in (size, -size):
                tried = best.copy()
                tried[axis] += step
                if (value := loss(tried)) < least - 1e-9:
                    best, least, helped = tried, value, True
                    break
        size = size if helped else size / 2
    return best


@dataclass(frozen=True, slots=True)
class Error:
    """Relative error of one run's time for each further token."""

    run: Run
    tpot: float


def left_out() -> list[Error]:
    """Every run, predicted from those of the other models."""
    every = runs()
    of = np.array([features(run) for run in every])
    found = []
    for held in CONFIGS:
        others = [index for index, run in enumerate(every) if run.model != held]
        mine = [index for index, run in enumerate(every) if run.model == held]
        numbers = fit(of[others], np.array([every[i].tpot for i in others]))
        times = tpot(numbers, of)
        found += [Error(every[index], abs(float(times[index]) / every[index].tpot - 1)) for index in mine]
    return found


def _model(name: str, fp8: bool) -> Model:
    config = CONFIGS[name]
    return models.parse({**config, "quantization_config": {"quant_method": "fp8", "bits": 8}} if fp8 else config, name)


if __name__ == "__main__":
    errors = left_out()
    for held in (*CONFIGS, "all"):
        values = [one.tpot for one in errors if held in (one.run.model, "all")]
        print(f"{held}: mean {statistics.mean(values):.3f}, median {statistics.median(values):.3f}")
