"""How long a step takes at best, and how long it should take, from a chip's peak figures.

A step multiplies its tokens with the weights and reads weights and cache; it takes as long as the slower of the two,
plus what the chips of a group tell each other, plus a fixed time. `Fractions` says how much of the peaks is reached;
with all of them 1 it is the limit that no measurement can beat.
"""

from __future__ import annotations

from dataclasses import dataclass

from deeplink.solver.estimates.model import Model

_ALL_REDUCES = 2
"""For each layer of a tensor-parallel group: after attention and after the MLP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """Peak figures of one chip: operations a second by element type, bytes of memory, bytes a second of memory and of
    the link to the other chips of its host, one way. `source` says where they come from."""

    name: str
    flops: tuple[tuple[str, float], ...]
    memory: float
    bandwidth: float
    link: float
    watts: float = 0.0
    source: str = ""

    def peak(self, bits: float) -> float:
        """Operations a second with weights of `bits`; smaller weights run at least as fast as 16-bit ones."""
        table = dict(self.flops)
        if bits <= 8 and "8bit" in table:
            return table["8bit"]
        return table["16bit"]


@dataclass(frozen=True, slots=True)
class Fractions:
    """How much of a chip's peaks is reached, and the seconds that every layer of a step costs whatever it does.
    `fitted` says whether that was seen on this chip, or on others."""

    compute: float
    memory: float
    fixed: float
    error: float
    source: str
    fitted: bool = True


_USUAL_ERROR = 0.9
_USUAL_COMPUTE, _USUAL_MEMORY, _USUAL_FIXED = 0.5, 0.7, 6e-5
_MOST_COMPUTE = 0.9


def usual(chip: Chip) -> Fractions:
    """What is assumed of a chip of which nothing was measured.

    Chips with more watts for an operation come closer to their peak, as the root of it: a T4 or an L4 is throttled
    where a V100 is not. The numbers and the error are those with which nine of ten times of five chips (V100, A100,
    H100, L4, T4; 2 to 4 models on engines of 2023) are within the error.
    """
    watts = chip.watts / (dict(chip.flops)["16bit"] / 1e12) if chip.watts else 1.0
    compute = min(_USUAL_COMPUTE * watts**0.5, _MOST_COMPUTE)
    return Fractions(
        compute, _USUAL_MEMORY, _USUAL_FIXED, _USUAL_ERROR, "usual fractions of a datasheet's peaks", fitted=False
    )


IDEAL = Fractions(1.0, 1.0, 0.0, 0.0, "the chip's peaks")


@dataclass(frozen=True, slots=True)
class Step:
    """Tokens of one step: `requests` requests with `tokens` new tokens each, behind `context` tokens each."""

    requests: float
    tokens: float
    context: float = 0.0


def seconds(model: Model, chip: Chip, step: Step, tp: int, fractions: Fractions, kv_dtype: str) -> float:
    """One step on a group of `tp` chips."""
    new = step.requests * step.tokens
    looked_at = step.context + (step.tokens + 1) / 2
    flops = 2.0 * model.active * new + model.attention_flops(new, looked_at)
    kv = step.requests * (step.context + step.tokens) * model.kv_bytes(kv_dtype)
    shards = 1 if model.replicated else min(tp, model.kv_heads)
    read = model.read_bytes(new) / tp + kv / shards
    compute = flops / tp / (chip.peak(model.bits) * fractions.compute)
    memory = read / (chip.bandwidth * fractions.memory)
    return max(compute, memory) + _told(model, chip, new, tp, fractions) + fractions.fixed * model.layers


def _told(model: Model, chip: Chip, tokens: float, tp: int, fractions: Fractions) -> float:
    """Seconds of all-reduces. The limit has none: they can be hidden in part."""
    if tp == 1 or fractions is IDEAL:
        return 0.0
    moved = tokens * model.hidden * 2.0 * 2 * (tp - 1) / tp
    return model.layers * _ALL_REDUCES * moved / (chip.link * fractions.memory)
