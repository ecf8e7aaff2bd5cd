"""Whole runs of dense models as they were served on H100 and H200, replayed, at rates that come from other models.

A step costs what the nine numbers of `silicon.py` say, which are fitted to the times per token of two models; the
requests are sent and the engines set as those who measured say:

- InferenceX (`benchmarks/70b_fp8_*.sh` of SemiAnalysisAI/InferenceX): ten requests for each at a time, all lengths from
  0.8 of what the table says to all of it, an 8-bit cache, vLLM with 8,192 new tokens a step, TensorRT-LLM with as many
  as a request may have, and with 1,024 of 1,024 tokens on fewer than eight chips it waits up to 20 steps for 0.9 of
  that.
- aiconfigurator (`src/aiconfigurator/eval/benchmarks/genai_perf_runner.py`): ten for each at a time after two to warm
  up, all of one length.

The mean over the requests is compared, which both report. What they do not say is how far such requests of one length
have come apart, after two rounds and more. So for each engine the most prompts that a step begins, and the seconds in
which a token is told to its client, are fitted to the runs of the other models, for the least error of the time to
first token. Nothing is fitted to the runs that are predicted.

`Errors.seen` is the same with these two from the answer of the run's own source, and one factor with them: what the
table could tell at best. That is not less because of Llama-3.1-8B. Its runs on TensorRT-LLM are answered sooner, by a
tenth and more, in 44 of 141 cases in which more requests are served at a time (`sooner`), which no queue does and none
of the 407 pairs of the other two models shows. Half of those on vLLM did more than nine tenths of what the chip can at
its peaks, up to 1.4 times that, so not all prompts were prefilled. And those on SGLang are not in step, as those of
Qwen3-32B on SGLang are.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import silicon
from closed_loop import Costs, Engine, Load, replay
from silicon import Array, Run

BEGUN = (1.0, 1.5, 2.0, 2.5, 3.0, 100.0)
SHOWN = (0.0, 2e-5, 5e-5, 8e-5)
BUDGET = 8192
"""New tokens of a step: the default of vLLM and TensorRT-LLM on these chips, and of SGLang's chunks."""


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of one run: of its time to first token, of the time per further token, both predicted from other
    models; and of the first with the engine's numbers and a factor taken from the answer of its source."""

    run: Run
    ttft: float
    tpot: float
    seen: float


def left_out() -> list[Errors]:
    every = silicon.runs()
    of = np.array([silicon.features(run) for run in every])
    seconds = np.array([run.tpot for run in every])
    found = []
    for held in silicon.CONFIGS:
        others = np.array([run.model != held for run in every])
        numbers = silicon.fit(of[others], seconds[others])
        costs = [_costs(run, row, numbers) for run, row in zip(every, of, strict=True)]
        for engine in sorted({run.engine for run in every}):
            mine = [i for i, run in enumerate(every) if run.engine == engine]
            train = [i for i in mine if every[i].model != held]
            test = [i for i in mine if every[i].model == held]
            if not test:
                continue
            # SGLang's scheduler says what a step begins, as nothing else is in it.
            choices = [(begun, shown) for begun in (BEGUN if engine != "sglang" else BEGUN[-1:]) for shown in SHOWN]
            best = min(choices, key=lambda two: _off(every, costs, train, *two))
            ttft, tpot = _times(every, costs, test, *best)
            first = np.array([every[i].ttft for i in test])
            further = np.array([every[i].tpot for i in test])
            seen = min((_times(every, costs, test, *two)[0] for two in choices), key=lambda t: _scaled(t, first).mean())
            rows = zip(test, abs(ttft / first - 1), abs(tpot / further - 1), _scaled(seen, first), strict=True)
            found += [Errors(every[i], float(a), float(b), float(c)) for i, a, b, c in rows]
    return found


def sooner(every: Sequence[Run], share: float = 0.1) -> dict[tuple[str, str], tuple[int, int]]:
    """By model and engine: in how many pairs of runs that differ only in the requests at a time, one being the next
    larger, the first token came sooner by that share with more of them; and how many pairs there are."""
    alike: dict[Run, dict[int, float]] = {}
    for run in every:
        alike.setdefault(replace(run, together=0, ttft=0.0, tpot=0.0), {})[run.together] = run.ttft
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for run, times in alike.items():
        ordered = [times[together] for together in sorted(times)]
        less = sum(more < few * (1 - share) for few, more in pairwise(ordered))
        count, pairs = found.get((run.model, run.engine), (0, 0))
        found[run.model, run.engine] = count + less, pairs + len(ordered) - 1
    return found


def _off(every: Sequence[Run], costs: Sequence[Costs], which: Sequence[int], begun: float, shown: float) -> float:
    ttft, _ = _times(every, costs, which, begun, shown)
    return float(abs(ttft / np.array([every[i].ttft for i in which]) - 1).mean())


def _times(
    every: Sequence[Run], costs: Sequence[Costs], which: Sequence[int], begun: float, shown: float
) -> tuple[Array, Array]:
    found = np.array([times(every[i], costs[i], begun, shown) for i in which])
    return found[:, 0], found[:, 1]


def times(run: Run, costs: Costs, begun: float, shown: float) -> tuple[float, float]:
    """Mean seconds to the first token and for each further one."""
    warm = 0 if run.inferencex else 2 * run.together
    load = Load(run.together, 10 * run.together + warm, run.prompt, run.output, 0.2 if run.inferencex else 0.0)
    asked, first, end, tokens = replay(load, _engine(run, begun, shown), costs)
    return float((first - asked)[warm:].mean()), float(((end - first) / (tokens - 1))[warm:].mean())


def _engine(run: Run, begun: float, shown: float) -> Engine:
    budget, wait_tokens, wait_steps = float(BUDGET), 0.0, 0
    if run.inferencex and run.engine == "trtllm":
        budget = run.prompt + run.output + 200.0
        if run.prompt == run.output and run.tp < 8:
            wait_tokens, wait_steps = 0.9 * budget, 20
    elif not run.inferencex:
        budget = min(budget, run.prompt * begun + run.together)
    return Engine(
        policy=int(run.engine == "sglang"),
        room=silicon.room(run),
        reserved=1.0 if run.engine == "trtllm" else 0.5,  # TensorRT-LLM does not begin what it may have to evict
        budget=budget,
        chunked=run.engine != "trtllm",
        wait_tokens=wait_tokens,
        wait_steps=wait_steps,
        shown=shown,
    )


def _costs(run: Run, row: Array, numbers: Array) -> Costs:
    weights, cache, _, told, layers, prefill, sent, together, _, reduces = row
    memory, kv, _, layer, sequence, link, reduce, _, compute = numbers
    attention = silicon.attention(run) / compute
    return Costs(
        step=float(weights / memory + layers * layer + reduces * reduce),
        sequence=float(sequence + told / link / together),
        cached=float(cache / kv / together / (run.prompt + run.output / 2)),
        token=float((prefill / compute - attention + sent / link) / run.prompt),
        pair=float(attention / (run.prompt**2 / 2)),
    )


def _scaled(predicted: Array, seconds: Array) -> Array:
    """The errors with that factor, of those that make one run right, with which they are the least."""
    best: Array = min(
        (abs(predicted * f / seconds - 1) for f in seconds / predicted), key=lambda off: float(off.mean())
    )
    return best


if __name__ == "__main__":
    errors = left_out()
    for source in (None, *sorted({(one.run.model, one.run.engine) for one in errors})):
        mine = [one for one in errors if source in (None, (one.run.model, one.run.engine))]
        text = ", ".join(
            f"{name} {statistics.mean(values):.3f} (median {statistics.median(values):.3f})"
            for name in ("ttft", "tpot", "seen")
            for values in ([getattr(one, name) for one in mine],)
        )
        print(f"{' '.join(source or ('all',))}, {len(mine)} runs: {text}")
    for (model, engine), (less, pairs) in sorted(sooner(silicon.runs()).items()):
        print(f"{model} {engine}: sooner with more requests at a time in {less} of {pairs} pairs")
