"""aiconfigurator's tables of vLLM's 16-bit kernels, as steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from deeplink.errors import RateError
from deeplink.solver.estimates import table
from deeplink.solver.estimates.kernels import (
    LAUNCH,
    Shape,
    between,
    context_attention,
    fitted,
    gemm,
    generation_attention,
    grid,
    measurement,
    no_chip,
    times,
)
from deeplink.solver.estimates.rates import Measurement
from deeplink.solver.estimates.roofline import Chip

SOURCE = "kernels of aiconfigurator {version} (Apache-2.0) put together; launches and the host guessed"
CHIPS = {
    "NVIDIA A100 SXM 80GB": "a100_sxm",
    "NVIDIA H100 SXM": "h100_sxm",
    "NVIDIA H200 SXM": "h200_sxm",
    "NVIDIA L40S": "l40s",
}


def read(folder: Path, chip: Chip, config: Mapping[str, Any], name: str, tp: int) -> list[Measurement]:
    """Steps from aiconfigurator's tables of vLLM's 16-bit kernels on this chip, in files called
    `SYSTEM__vllmVERSION__KERNEL.csv.gz`. Raises RateError where one is missing."""
    shape = Shape.of(config)
    system = CHIPS.get(chip.name)
    if system is None:
        raise no_chip(chip.name, CHIPS)
    made = _Tables(folder, system, chip)
    source = SOURCE.format(version=made.version)
    rows = []
    for phase, requests, tokens, context in grid():
        new = requests * tokens
        layer = made.layer(shape, new, tp)
        layer += made.context(shape, requests, tokens, tp) if phase == "prefill" else 0.0
        layer += made.generation(shape, requests, context, tp) if phase == "decode" else 0.0
        seconds = shape.layers * (layer + LAUNCH) + made.gemm_of(requests, shape.vocabulary / tp, shape.hidden)
        row = measurement(chip, name, tp, phase, requests, tokens, context, seconds, source)
        rows.append(replace(row, engine="vllm"))
    return rows


class _Tables:
    """One system's tables."""

    def __init__(self, folder: Path, system: str, chip: Chip) -> None:
        self.chip = chip
        path = self._path(folder, system, "gemm_perf_bf16")
        self.version = path.name.split("__")[1].removeprefix("vllm")
        self.gemms = fitted(times(path, ("m", "n", "k"), 1e-3), lambda size: gemm(chip, size[0], size[1], size[2]))
        columns = ("batch_size", "isl", "num_heads", "num_key_value_heads")
        path = self._path(folder, system, "context_attention_perf_bf16")
        self.contexts = fitted(times(path, columns, 1e-3), lambda size: context_attention(chip, *size))
        columns = ("batch_size", "step", "num_heads", "num_key_value_heads")
        path = self._path(folder, system, "generation_attention_perf_bf16")
        self.generations = fitted(times(path, columns, 1e-3), lambda size: generation_attention(chip, *size))
        path = self._path(folder, system, "custom_allreduce")
        self.reduces = list(_reduces(path))

    def layer(self, shape: Shape, new: float, tp: int) -> float:
        heads, kv = shape.heads / tp, max(shape.kv_heads / tp, 1)
        hidden, dim = shape.hidden, shape.head_dim
        seconds = self.gemm_of(new, (heads + 2 * kv) * dim, hidden) + self.gemm_of(new, hidden, heads * dim)
        seconds += self.gemm_of(new, 2 * shape.intermediate / tp, hidden)
        seconds += self.gemm_of(new, hidden, shape.intermediate / tp)
        return seconds + (2 * self._reduce(new * hidden, tp) if tp > 1 else 0.0)

    def gemm_of(self, m: float, n: float, k: float) -> float:
        return self.gemms.of((m, n, k), gemm(self.chip, m, n, k))

    def context(self, shape: Shape, requests: float, tokens: float, tp: int) -> float:
        size = (requests, tokens, shape.heads / tp, max(shape.kv_heads / tp, 1))
        return self.contexts.of(size, context_attention(self.chip, *size))

    def generation(self, shape: Shape, requests: float, context: float, tp: int) -> float:
        size = (requests, context, shape.heads / tp, max(shape.kv_heads / tp, 1))
        return self.generations.of(size, generation_attention(self.chip, *size))

    def _reduce(self, elements: float, tp: int) -> float:
        """Their sizes are elements: as bytes, the links would reach half of what they do."""
        mine = sorted((size, seconds) for chips, size, seconds in self.reduces if chips == tp)
        if not mine:
            raise RateError(f"no all-reduce of {tp} chips is in the table", field="tp", ours=str(tp))
        return between(mine, elements)

    def _path(self, folder: Path, system: str, kernel: str) -> Path:
        named = f"{system}__vllm*__{kernel}"
        found = sorted([*folder.glob(f"{named}.csv*"), *folder.glob(f"{named}.parquet")])
        if not found:
            raise RateError(
                f"{folder} has no {kernel} of {system}",
                field="table",
                ours=str(folder),
                theirs=f"{system}__vllm…__{kernel}.csv.gz or .parquet",
                remedy="copy aiconfigurator's Parquet file under this name, or export it as CSV",
            )
        return found[-1]


def _reduces(path: Path) -> Iterator[tuple[int, float, float]]:
    """Chips, elements and seconds of all-reduces as they are captured in a graph, which decode steps are."""
    for line, row in table.records(
        table.contents(path), str(path), ("kernel_source", "num_gpus", "message_size", "latency")
    ):
        number = partial(table.figure, row, name=str(path), line=line, least=1e-9)
        if row["kernel_source"].endswith("graph"):
            yield int(number("num_gpus")), number("message_size"), number("latency") * 1e-3
