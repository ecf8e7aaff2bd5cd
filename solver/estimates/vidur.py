"""Vidur's profiles of a model's linear operators, as steps. Attention is the roofline's, for its profile was not at
hand."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from deeplink.errors import RateError
from deeplink.solver.estimates import model as models
from deeplink.solver.estimates import table
from deeplink.solver.estimates.kernels import ELEMENT, LAUNCH, REACHED, Shape, between, gemm, grid, measurement, no_chip
from deeplink.solver.estimates.rates import Measurement
from deeplink.solver.estimates.roofline import Chip, Step

SOURCE = "operators of Vidur (microsoft/vidur @ 7d47513, MIT) put together; attention by the roofline, the host guessed"
CHIPS = {"NVIDIA A100 SXM 80GB": "a100", "NVIDIA H100 SXM": "h100"}


def read(folder: Path, chip: Chip, config: Mapping[str, Any], name: str, tp: int) -> list[Measurement]:
    """Steps from Vidur's profiles of the linear operators, `CHIP__MODEL__mlp.csv.gz`, and of all-reduces. Attention is
    the roofline's, for its profile was not at hand. Raises RateError where the profile is of another model."""
    shape = Shape.of(config)
    prefix = CHIPS.get(chip.name)
    if prefix is None:
        raise no_chip(chip.name, CHIPS)
    operators = _operators(folder, prefix, shape, tp)
    reduces = _reduces(folder / f"{prefix}_dgx__all_reduce.csv.gz", tp)
    model = models.parse(config, name)
    rows = []
    for phase, requests, tokens, context in grid():
        new = requests * tokens
        if new > operators[-1][0]:
            continue
        linear = between(operators, new)
        told = 2 * between(reduces, new * shape.hidden * ELEMENT) if tp > 1 else 0.0
        attention = _attention(model, chip, Step(requests, tokens, context), tp)
        head = gemm(chip, requests, shape.vocabulary / tp, shape.hidden, REACHED)
        seconds = shape.layers * (linear + told + LAUNCH) + attention + head
        rows.append(measurement(chip, name, tp, phase, requests, tokens, context, seconds, SOURCE))
    return rows


def _attention(model: models.Model, chip: Chip, step: Step, tp: int) -> float:
    new = step.requests * step.tokens
    flops = model.attention_flops(new, step.context + (step.tokens + 1) / 2) / tp
    read = step.requests * (step.context + step.tokens) * model.kv_bytes("float16") / min(tp, model.kv_heads)
    return max(flops / (chip.peak(16) * REACHED.compute), read / (chip.bandwidth * REACHED.memory))


LINEAR = (
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
    names = [f"time_stats.{name}.median" for name in LINEAR]
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
