"""Times of single kernels, put together into the steps of a model.

A step is what its layers compute, what the chips of a group tell each other, and the output head. Between the measured
sizes a kernel's time is its roofline times what the nearest measured sizes took of theirs. What no table has (launches,
scheduling, sampling, the host) is a guess for each layer. A table put together like this is no measurement, and every
row says so in its source and its error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deeplink.errors import RateError
from deeplink.solver.estimates import model as models
from deeplink.solver.estimates import roofline, table
from deeplink.solver.estimates.rates import Measurement, Phase
from deeplink.solver.estimates.roofline import Chip, Fractions

PROMPTS = (128, 256, 512, 1024, 2048, 4096, 8192)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (512, 1024, 2048, 4096, 8192)
LAUNCH = 4.5e-5
"""Seconds of a layer beyond its kernels: what steps of Qwen3-32B took longer that vLLM 0.12 served on 2 to 8 H100 with
few sequences. Engines of 2023 needed up to five times that."""
ERROR = 0.45
"""Of a step. With that, steps of up to 64 sequences there took 0.95 to 1.25 times as long as this says. On engines of
2023 it was 1.0 to 1.3 times with two chips, but with eight twice as long is usual."""
NEAREST = 6
ELEMENT = 2.0
"""Bytes: only 16-bit kernels are read."""
REACHED = Fractions(0.6, 0.7, 0.0, 0.0, "")
"""Of the peaks, by what no table has."""
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
        near = np.argpartition(apart, min(NEAREST, len(apart) - 1))[:NEAREST]
        weights = 1.0 / (apart[near] + 1e-3) ** 2
        return float(ideal * math.exp((weights * np.log(self.ratios[near])).sum() / weights.sum()))


def fitted(rows: Sequence[tuple[tuple[float, ...], float]], ideal: Callable[[tuple[float, ...]], float]) -> Kernel:
    sizes = np.log(np.array([size for size, _ in rows]))
    return Kernel(sizes, np.array([seconds / ideal(size) for size, seconds in rows]))


def times(path: Path, columns: Sequence[str], scale: float) -> list[tuple[tuple[float, ...], float]]:
    found = []
    for line, row in table.records(table.contents(path), str(path), (*columns, "latency")):
        number = partial(table.figure, row, name=str(path), line=line, least=1e-9)
        found.append((tuple(number(column) for column in columns), number("latency") * scale))
    return found


def gemm(chip: Chip, m: float, n: float, k: float, reached: Fractions = roofline.IDEAL) -> float:
    flops, moved = 2 * m * n * k, ELEMENT * (m * k + k * n + m * n)
    return max(flops / (chip.peak(16) * reached.compute), moved / (chip.bandwidth * reached.memory))


def context_attention(
    chip: Chip, requests: float, tokens: float, heads: float, kv_heads: float, dim: float = 128
) -> float:
    flops = 4 * requests * heads * dim * tokens * (tokens + 1) / 2
    moved = ELEMENT * requests * tokens * dim * (2 * heads + 2 * kv_heads)
    return max(flops / chip.peak(16), moved / chip.bandwidth)


def generation_attention(
    chip: Chip, requests: float, context: float, heads: float, kv_heads: float, dim: float = 128
) -> float:
    moved = ELEMENT * requests * (context * 2 * kv_heads + 2 * heads) * dim
    return max(4 * requests * heads * dim * context / chip.peak(16), moved / chip.bandwidth)


def between(points: Sequence[tuple[float, float]], size: float) -> float:
    """On the straight lines through logarithms of these; beyond the last, as the last by its size."""
    sizes, seconds = zip(*points, strict=True)
    if size > sizes[-1]:
        return float(seconds[-1] * size / sizes[-1])
    return float(math.exp(np.interp(math.log(size), np.log(sizes), np.log(seconds))))


def grid() -> Iterator[tuple[Phase, int, int, float]]:
    for tokens in PROMPTS:
        yield "prefill", 1, tokens, 0.0
    for context in CONTEXTS:
        for requests in BATCHES:
            yield "decode", requests, 1, float(context)


def measurement(
    chip: Chip,
    name: str,
    tp: int,
    phase: Phase,
    requests: int,
    tokens: int,
    context: float,
    seconds: float,
    source: str,
) -> Measurement:
    return Measurement(
        chip=chip.name,
        model=name,
        tp=tp,
        phase=phase,
        requests=requests,
        tokens=tokens,
        context=context,
        seconds=float(f"{seconds:.6g}"),
        source=source,
        error=ERROR,
    )


def no_chip(name: str, known: Mapping[str, str]) -> RateError:
    return RateError(
        f"no table is of {name}",
        field="chip",
        ours=name,
        theirs=", ".join(known),
        remedy="use a pool of one of these chips, or measure the engine",
    )
