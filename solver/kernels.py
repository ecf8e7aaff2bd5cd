"""Times of single kernels, put together into the steps of a model: aiconfigurator's tables, and Vidur's.

A step is what its layers compute, what the chips of a group tell each other, and the output head. Between the measured
sizes a kernel's time is its roofline times what the nearest measured sizes took of theirs. What no table has (launches,
scheduling, sampling, the host) is missing, so an engine is slower than this: a table put together like this belongs
beside measurements, not in their place, and every row says so in its source and its error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deeplink.errors import RateError
from deeplink.solver import model as models
from deeplink.solver import roofline, table
from deeplink.solver.rates import Measurement
from deeplink.solver.roofline import Chip, Fractions, Step

AICONFIGURATOR = "kernels of aiconfigurator {version} (Apache-2.0) put together; without launches and the host"
AICONFIGURATOR_CHIPS = {
    "NVIDIA A100 SXM 80GB": "a100_sxm",
    "NVIDIA H100 SXM": "h100_sxm",
    "NVIDIA H200 SXM": "h200_sxm",
    "NVIDIA L40S": "l40s",
}
VIDUR = "operators of Vidur (microsoft/vidur @ 7d47513, MIT) put together; attention by the roofline, without the host"
VIDUR_CHIPS = {"NVIDIA A100 SXM 80GB": "a100", "NVIDIA H100 SXM": "h100"}
PROMPTS = (128, 256, 512, 1024, 2048, 4096, 8192)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (512, 1024, 2048, 4096, 8192)
ERROR = 0.45
"""Of a step: served steps of a dense model took 1.15 to 1.7 times as long as its kernels, the more the more chips."""
_NEAREST = 6
_ELEMENT = 2.0
"""Bytes: only 16-bit kernels are read."""
_REACHED = Fractions(0.6, 0.7, 0.0, 0.0, "")
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model's config a kernel's size depends on."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """Raises RateError for a model that is not dense, or whose MLP has no gate: no table has its kernels."""
        shape = models.parse(config)
        if shape.experts or shape.replicated or "intermediate_size" not in config:
            raise RateError(
                f"the kernels of {shape.name} are in no table",
                field="model",
                ours=shape.name,
                theirs="dense models with a gated MLP and grouped heads",
                remedy="measure the engine, with deeplink measure or vllm bench serve",
            )
        return cls(
            shape.layers,
            shape.hidden,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            int(config["intermediate_size"]),
            int(config["vocab_size"]),
        )


@dataclass(frozen=True, slots=True)
class Kernel:
    """Measured times by size; `sizes` are their logarithms, `ratios` the times by their rooflines."""

    sizes: Array
    ratios: Array

    def of(self, size: Sequence[float], ideal: float) -> float:
        """Seconds at `size`, whose roofline is `ideal`: by the nearest measured sizes, the nearer the more."""
        apart = np.sqrt(((self.sizes - np.log(np.asarray(size))) ** 2).sum(axis=1))
        near = np.argpartition(apart, min(_NEAREST, len(apart) - 1))[:_NEAREST]
        weights = 1.0 / (apart[near] + 1e-3) ** 2
        return float(ideal * math.exp((weights * np.log(self.ratios[near])).sum() / weights.sum()))


def aiconfigurator(folder: Path, chip: Chip, config: Mapping[str, Any], name: str, tp: int) -> list[Measurement]:
    """Steps from aiconfigurator's tables of vLLM's 16-bit kernels on this chip, in files called
    `SYSTEM__vllmVERSION__KERNEL.csv.gz`. Raises RateError where one is missing."""
    shape = Shape.of(config)
    system = AICONFIGURATOR_CHIPS.get(chip.name)
    if system is None:
        raise _no_chip(chip.name, AICONFIGURATOR_CHIPS)
    made = _Tables(folder, system, chip)
    source = AICONFIGURATOR.format(version=made.version)
    rows = []
    for phase, requests, tokens, context in _grid():
        new = requests * tokens
        layer = made.layer(shape, new, tp)
        layer += made.context(shape, requests, tokens, tp) if phase == "prefill" else 0.0
        layer += made.generation(shape, requests, context, tp) if phase == "decode" else 0.0
        seconds = shape.layers * layer + made.gemm_of(requests, shape.vocabulary / tp, shape.hidden)
        rows.append(_row(chip, name, tp, phase, requests, tokens, context, seconds, source))
    return rows


def vidur(folder: Path, chip: Chip, config: Mapping[str, Any], name: str, tp: int) -> list[Measurement]:
    """Steps from Vidur's profiles of the linear operators, `CHIP__MODEL__mlp.csv.gz`, and of all-reduces. Attention is
    the roofline's, for its profile was not at hand. Raises RateError where the profile is of another model."""
    shape = Shape.of(config)
    prefix = VIDUR_CHIPS.get(chip.name)
    if prefix is None:
        raise _no_chip(chip.name, VIDUR_CHIPS)
    operators = _operators(folder, prefix, shape, tp)
    reduces = _reduces(folder / f"{prefix}_dgx__all_reduce.csv.gz", tp)
    model = models.parse(config, name)
    rows = []
    for phase, requests, tokens, context in _grid():
        new = requests * tokens
        if new > operators[-1][0]:
            continue
        linear = _between(operators, new)
        told = 2 * _between(reduces, new * shape.hidden * _ELEMENT) if tp > 1 else 0.0
        attention = _attention(model, chip, Step(requests, tokens, context), tp)
        head = _gemm(chip, requests, shape.vocabulary / tp, shape.hidden, _REACHED)
        seconds = shape.layers * (linear + told) + attention + head
        rows.append(_row(chip, name, tp, phase, requests, tokens, context, seconds, VIDUR))
    return rows


class _Tables:
    """One system's tables."""

    def __init__(self, folder: Path, system: str, chip: Chip) -> None:
        self.chip = chip
        path = self._path(folder, system, "gemm_perf_bf16")
        self.version = path.name.split("__")[1].removeprefix("vllm")
        read = partial(_read, scale=1e-3)
        self.gemms = _kernel(read(path, ("m", "n", "k")), lambda size: _gemm(chip, *size))
        columns = ("batch_size", "isl", "num_heads", "num_key_value_heads")
        path = self._path(folder, system, "context_attention_perf_bf16")
        self.contexts = _kernel(read(path, columns), lambda size: _context(chip, *size))
        columns = ("batch_size", "step", "num_heads", "num_key_value_heads")
        path = self._path(folder, system, "generation_attention_perf_bf16")
        self.generations = _kernel(read(path, columns), lambda size: _generation(chip, *size))
        path = self._path(folder, system, "custom_allreduce")
        self.reduces = list(table.records(table.contents(path), str(path), ("num_gpus", "message_size")))

    def layer(self, shape: Shape, new: float, tp: int) -> float:
        heads, kv = shape.heads / tp, max(shape.kv_heads / tp, 1)
        hidden, dim = shape.hidden, shape.head_dim
        seconds = self.gemm_of(new, (heads + 2 * kv) * dim, hidden) + self.gemm_of(new, hidden, heads * dim)
        seconds += self.gemm_of(new, 2 * shape.intermediate / tp, hidden)
        seconds += self.gemm_of(new, hidden, shape.intermediate / tp)
        return seconds + (2 * self._reduce(new * hidden, tp) if tp > 1 else 0.0)

    def gemm_of(self, m: float, n: float, k: float) -> float:
        return self.gemms.of((m, n, k), _gemm(self.chip, m, n, k))

    def context(self, shape: Shape, requests: float, tokens: float, tp: int) -> float:
        size = (requests, tokens, shape.heads / tp, max(shape.kv_heads / tp, 1))
        return self.contexts.of(size, _context(self.chip, *size))

    def generation(self, shape: Shape, requests: float, context: float, tp: int) -> float:
        size = (requests, context, shape.heads / tp, max(shape.kv_heads / tp, 1))
        return self.generations.of(size, _generation(self.chip, *size))

    def _reduce(self, elements: float, tp: int) -> float:
        """Their sizes are elements: as bytes, the links would reach half of what they do."""
        mine = sorted(
            (float(row["message_size"]), float(row["latency"]) * 1e-3)
            for _, row in self.reduces
            if int(row["num_gpus"]) == tp and row["kernel_source"].endswith("graph")
        )
        if not mine:
            raise RateError(f"no all-reduce of {tp} chips is in the table", field="tp", ours=str(tp))
        return _between(mine, elements)

    def _path(self, folder: Path, system: str, kernel: str) -> Path:
        found = sorted(folder.glob(f"{system}__vllm*__{kernel}.csv*"))
        if not found:
            raise RateError(
                f"{folder} has no {kernel} of {system}",
                field="table",
                ours=str(folder),
                theirs=f"{system}__vllm…__{kernel}.csv.gz",
                remedy="export the table from aiconfigurator's parquet file",
            )
        return found[-1]


def _kernel(rows: Sequence[tuple[tuple[float, ...], float]], ideal: Any) -> Kernel:
    sizes = np.log(np.array([size for size, _ in rows]))
    return Kernel(sizes, np.array([seconds / ideal(size) for size, seconds in rows]))


def _read(path: Path, columns: Sequence[str], scale: float) -> list[tuple[tuple[float, ...], float]]:
    found = []
    for line, row in table.records(table.contents(path), str(path), (*columns, "latency")):
        number = partial(table.figure, row, name=str(path), line=line, least=1e-9)
        found.append((tuple(number(column) for column in columns), number("latency") * scale))
    return found


def _gemm(chip: Chip, m: float, n: float, k: float, reached: Fractions = roofline.IDEAL) -> float:
    flops, moved = 2 * m * n * k, _ELEMENT * (m * k + k * n + m * n)
    return max(flops / (chip.peak(16) * reached.compute), moved / (chip.bandwidth * reached.memory))


def _context(chip: Chip, requests: float, tokens: float, heads: float, kv_heads: float, dim: float = 128) -> float:
    flops = 4 * requests * heads * dim * tokens * (tokens + 1) / 2
    moved = _ELEMENT * requests * tokens * dim * (2 * heads + 2 * kv_heads)
    return max(flops / chip.peak(16), moved / chip.bandwidth)


def _generation(chip: Chip, requests: float, context: float, heads: float, kv_heads: float, dim: float = 128) -> float:
    moved = _ELEMENT * requests * (context * 2 * kv_heads + 2 * heads) * dim
    return max(4 * requests * heads * dim * context / chip.peak(16), moved / chip.bandwidth)


def _attention(model: models.Model, chip: Chip, step: Step, tp: int) -> float:
    new = step.requests * step.tokens
    flops = model.attention_flops(new, step.context + (step.tokens + 1) / 2) / tp
    read = step.requests * (step.context + step.tokens) * model.kv_bytes("float16") / min(tp, model.kv_heads)
    return max(flops / (chip.peak(16) * _REACHED.compute), read / (chip.bandwidth * _REACHED.memory))


_LINEAR = (
    "input_layernorm",
    "attn_pre_proj",
    "attn_rope",
    "attn_post_proj",
    "post_attention_layernorm",
    "mlp_up_proj",
    "mlp_act",
    "mlp_down_proj",
    "add",
)


def _operators(folder: Path, prefix: str, shape: Shape, tp: int) -> list[tuple[float, float]]:
    """Seconds of a layer's linear operators by tokens, sorted."""
    paths = sorted(folder.glob(f"{prefix}__*__mlp.csv*"))
    key = (shape.heads, shape.kv_heads, shape.hidden, shape.intermediate)
    names = [f"time_stats.{name}.median" for name in _LINEAR]
    found = {}
    for path in paths:
        columns = (*names, "n_head", "n_kv_head", "n_embd", "n_expanded_embd", "num_tokens")
        for line, row in table.records(table.contents(path), str(path), (*columns, "num_tensor_parallel_workers")):
            number = partial(table.figure, row, name=str(path), line=line, least=0.0)
            sizes = tuple(int(number(column)) for column in ("n_head", "n_kv_head", "n_embd", "n_expanded_embd"))
            if sizes == key and int(number("num_tensor_parallel_workers")) == tp:
                found[number("num_tokens")] = sum(number(name) for name in names) * 1e-3
    if not found:
        raise RateError(
            f"{folder} has no profile of such a model on {prefix} with groups of {tp}",
            field="table",
            ours=", ".join(map(str, key)),
            theirs=", ".join(path.name for path in paths) or "no file",
            remedy="profile it with Vidur, or measure the engine",
        )
    return sorted(found.items())


def _reduces(path: Path, tp: int) -> list[tuple[float, float]]:
    """Seconds of an all-reduce within one host by bytes, sorted."""
    if tp == 1:
        return []
    found = {}
    for line, row in table.records(table.contents(path), str(path), ("time_stats.all_reduce.median", "num_workers")):
        number = partial(table.figure, row, name=str(path), line=line, least=0.0)
        if int(number("num_workers")) == tp == int(number("devices_per_node")):
            found[number("size")] = max(number("time_stats.all_reduce.median"), 1e-3) * 1e-3
    if not found:
        raise RateError(f"{path.name} has no all-reduce of {tp} chips of one host", field="tp", ours=str(tp))
    return sorted(found.items())


def _between(points: Sequence[tuple[float, float]], size: float) -> float:
    """On the straight lines through logarithms of these; beyond the last, as the last by its size."""
    sizes, seconds = zip(*points, strict=True)
    if size > sizes[-1]:
        return float(seconds[-1] * size / sizes[-1])
    return float(math.exp(np.interp(math.log(size), np.log(sizes), np.log(seconds))))


def _grid() -> Iterator[tuple[str, int, int, float]]:
    for tokens in PROMPTS:
        yield "prefill", 1, tokens, 0.0
    for context in CONTEXTS:
        for requests in BATCHES:
            yield "decode", requests, 1, float(context)


def _row(
    chip: Chip, name: str, tp: int, phase: str, requests: int, tokens: int, context: float, seconds: float, source: str
) -> Measurement:
    return Measurement(
        chip=chip.name,
        model=name,
        tp=tp,
        phase=phase,  # type: ignore[arg-type]
        requests=requests,
        tokens=tokens,
        context=context,
        seconds=float(f"{seconds:.6g}"),
        source=source,
        error=ERROR,
    )


def _no_chip(name: str, known: Mapping[str, str]) -> RateError:
    return RateError(
        f"no table is of {name}",
        field="chip",
        ours=name,
        theirs=", ".join(known),
        remedy="use a pool of one of these chips, or measure the engine",
    )
