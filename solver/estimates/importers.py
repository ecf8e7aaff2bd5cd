"""Measurements of other projects and tools, as the solver keeps them.

What their numbers mean is written at each; what cannot be is for `deeplink.solver.estimates.table.possible` to find.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from deeplink.errors import RateError
from deeplink.solver.estimates import table
from deeplink.solver.estimates.model import Model
from deeplink.solver.estimates.rates import Measurement, Phase

SPLITWISE = "Splitwise simulator (Mutinifni/splitwise-sim @ 8f99e7d, MIT), data/perf_model.csv"
SPLITWISE_CHIPS = {
    "a100-80gb": "NVIDIA A100 SXM 80GB",
    "h100-80gb": "NVIDIA H100 SXM",
    "h100-80gb-pcap": "NVIDIA H100 SXM, power-capped",
}


def splitwise(path: Path) -> list[Measurement]:
    """The runs of Splitwise: each is a prefill, and decode steps whose context grows from the prompt on."""
    columns = (
        "model",
        "hardware",
        "prompt_size",
        "batch_size",
        "token_size",
        "prompt_time",
        "token_time",
        "tensor_parallel",
    )
    found = []
    for line, row in table.records(table.contents(path), str(path), columns):
        number = partial(table.figure, row, name=str(path), line=line, least=1e-6)
        prompt, generated, requests = number("prompt_size"), number("token_size"), int(number("batch_size"))
        chip = SPLITWISE_CHIPS.get(row["hardware"], row["hardware"])
        for phase, tokens, context, key in (
            ("prefill", int(prompt), 0.0, "prompt_time"),
            ("decode", 1, prompt + generated / 2, "token_time"),
        ):
            found.append(
                Measurement(
                    chip=chip,
                    model=row["model"],
                    tp=int(number("tensor_parallel")),
                    phase=cast(Phase, phase),
                    requests=requests,
                    tokens=tokens,
                    context=context,
                    seconds=number(key) / 1e3,
                    source=SPLITWISE,
                    line=line,
                )
            )
    return found


HELIX = "Helix (Thesys-lab/Helix-ASPLOS25 @ 148b733, Apache-2.0), simulator/model_manager"
HELIX_CHIPS = {"a100": "NVIDIA A100 SXM 80GB", "v100": "NVIDIA V100", "l4": "NVIDIA L4", "t4": "NVIDIA T4"}
HELIX_CONTEXT = 1024.0
"""Helix' tables do not say how long the sequences of a decode step are."""


def helix(folder: Path, models: Mapping[str, Model]) -> list[Measurement]:
    """Helix' tables, which are milliseconds of one layer by tokens (prompts) or sequences (decode), one file per model,
    chips and phase. Its first row, no time for no work, says nothing."""
    found = []
    for path in sorted(folder.glob("*__*__*_bs2time.csv*")):
        model, chips, kind = path.name.split(".")[0].removesuffix("_bs2time").split("__")
        chip, _, count = chips.partition("x")
        phase: Phase = "prefill" if kind == "prompt" else "decode"
        if model not in models:
            raise RateError(f"{path.name}: nothing is known about this model", field="model", ours=model)
        for line, text in enumerate(table.contents(path).splitlines(), 1):
            size, _, milliseconds = text.partition(",")
            if float(size) <= 0 or float(milliseconds) <= 0:
                continue
            found.append(
                Measurement(
                    chip=HELIX_CHIPS.get(chip, chip),
                    model=model,
                    tp=int(count or 1),
                    phase=phase,
                    requests=1 if phase == "prefill" else int(size),
                    tokens=int(size) if phase == "prefill" else 1,
                    context=0.0 if phase == "prefill" else HELIX_CONTEXT,
                    seconds=float(milliseconds) / 1e3 * models[model].layers,
                    source=HELIX,
                    line=line,
                )
            )
    return found


def vllm_bench(path: Path, *, chip: str, tp: int, model: str) -> list[Measurement]:
    """What `vllm bench serve --save-result` wrote, one file or a folder of them.

    A run with one request at a time (``--max-concurrency 1``) says how long prefill takes, from its median time to
    first token; one with n at a time how long a decode step of n takes, from the median time between tokens, which few
    steps that also prefill do not move. Requests must come as fast as they are taken (``--request-rate inf``), or there
    are fewer at a time than the file says.
    """
    paths = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not paths:
        raise RateError(
            f"{path} has no results", field="table", ours=str(path), remedy="vllm bench serve --save-result"
        )
    found = []
    for one in paths:
        try:
            result = json.loads(table.contents(one))
        except (ValueError, RecursionError) as exc:
            raise RateError(f"{one.name} is not JSON: {exc}", remedy="vllm bench serve --save-result") from exc
        found += _run(result, one.name, chip, tp, model)
    return found


def _run(result: Any, name: str, chip: str, tp: int, model: str) -> list[Measurement]:
    if not isinstance(result, dict):
        raise RateError(f"{name} is not a result", remedy="vllm bench serve --save-result")
    if result.get("request_rate") not in ("inf", None):
        raise RateError(
            f"{name}: requests came at a rate",
            field="request_rate",
            ours=str(result["request_rate"]),
            theirs="inf",
            remedy="run it with --request-rate inf and --max-concurrency",
        )
    number = partial(_positive, result, name)
    concurrency = int(number("max_concurrency"))
    prompt = number("total_input_tokens") / number("completed")
    output = number("total_output_tokens") / number("completed")
    source = f"vllm bench serve, {result.get('date', 'no date')}, {name}"
    decode = Measurement(
        chip=chip,
        model=model,
        tp=tp,
        phase="decode",
        requests=concurrency,
        tokens=1,
        context=prompt + output / 2,
        seconds=number("median_itl_ms") / 1e3,
        source=source,
    )
    if concurrency > 1:
        return [decode]
    prefill = Measurement(
        chip=chip,
        model=model,
        tp=tp,
        phase="prefill",
        requests=1,
        tokens=round(prompt),
        context=0.0,
        seconds=number("median_ttft_ms") / 1e3,
        source=source,
    )
    return [prefill, decode]


def _positive(result: dict[str, Any], name: str, key: str) -> float:
    value = result.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise RateError(
            f"{name}: no usable {key}",
            field=key,
            ours=repr(value),
            theirs="more than 0",
            remedy="run the benchmark again",
        )
    return float(value)
