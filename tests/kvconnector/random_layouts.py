"""Hypothesis strategies for layouts, block tables and ranges of tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st
from reference import AXES, addresses, sides, tensor_sizes

from deeplink.kvconnector.layouts.layout import Bound, Layout
from deeplink.kvconnector.relayout.plan import Chunk


@dataclass(frozen=True)
class Sized:
    """A layout text with the sizes it is bound to."""

    text: str
    blocks: int
    heads: int
    block_size: int
    dim: int

    @property
    def sizes(self) -> dict[str, int]:
        return {"block": self.blocks, "head": self.heads, "token": self.block_size, "dim": self.dim}

    def bind(self) -> Bound:
        return Layout.parse(self.text).bind(
            heads=self.heads, head_dim=self.dim, block_size=self.block_size, blocks=self.blocks
        )

    def addresses(self) -> np.ndarray:
        """``[kv, block, head, token, dim]``, counting on through the tensors of a layer."""
        return addresses(self.text, self.sizes)

    @property
    def kv(self) -> int:
        return len(sides(self.text))

    @property
    def tensors(self) -> list[int]:
        """Elements of each tensor of a layer."""
        return tensor_sizes(self.text, self.sizes)


@st.composite
def layouts(
    draw: st.DrawFn,
    heads: int | None = None,
    dim: int | None = None,
    blocks: int | None = None,
    kv: int | None = None,
) -> Sized:
    """Any layout the grammar allows, with sizes its factors divide."""
    kv = kv or (2 if heads and heads > 1 else draw(st.sampled_from([1, 2, 2])))
    sized = Sized(
        "",
        blocks or draw(st.integers(1, 5)),
        heads or (draw(st.integers(1, 4)) if kv == 2 else 1),
        draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16])),
        dim or draw(st.sampled_from([1, 2, 4, 6, 8])),
    )
    if kv == 1:
        return draw(_vectors(sized))
    separate = draw(st.booleans())
    prefix = "kv | " if separate else ""
    outer: list[str] = []
    if not draw(st.booleans()):
        fused = draw(st.sampled_from(["", "head dim", "token dim", "slot", "head slot"]))
        outer = [] if separate else ["kv"]
        for axis in AXES:
            if axis not in fused.replace("slot", "block token"):
                outer += _parts(draw, axis, sized.sizes[axis])
        if fused:
            outer += _fused(draw, fused, sized.sizes[fused.replace("slot", "token").split()[-1]])
        return replace(sized, text=prefix + " ".join(_grouped(draw, draw(st.permutations(outer)))))
    k: list[str] = []
    v: list[str] = []
    for axis in AXES:
        place = draw(st.sampled_from(["outer", "inner", "across"]))
        parts = _parts(draw, axis, sized.sizes[axis])
        if place == "outer":
            outer += parts
        elif place == "across" and len(parts) == 2:
            outside, inside = draw(st.permutations(parts))
            outer.append(outside)
            k.append(inside)
            v.append(inside)
        else:
            k += parts
            v += _parts(draw, axis, sized.sizes[axis])  # K and V may be factored differently
    if not k:
        outer.remove("block")
        k, v = ["block"], ["block"]
    words = _grouped(draw, draw(st.permutations(outer)))
    k_text = " ".join(_grouped(draw, draw(st.permutations(k))))
    v_text = " ".join(_grouped(draw, draw(st.permutations(v))))
    return replace(sized, text=prefix + " ".join([*words, f"(k: {k_text} | v: {v_text})"]))


@st.composite
def tables(draw: st.DrawFn, sized: Sized, most_tokens: int = 64) -> tuple[list[int], Chunk]:
    """Distinct blocks in any order, and a range of the tokens they hold."""
    order = draw(st.permutations(range(sized.blocks)))
    table = order[: draw(st.integers(1, sized.blocks))]
    held = len(table) * sized.block_size
    start = draw(st.integers(0, held - 1))
    return table, Chunk(start, draw(st.integers(start + 1, min(held, start + most_tokens))))


@st.composite
def _vectors(draw: st.DrawFn, sized: Sized) -> Sized:
    """A layout without kv and head, of these sizes."""
    first = draw(st.integers(1, sized.dim))
    part, prefix = sized.dim, ""
    if first < sized.dim:
        rest = sized.dim - first
        part, prefix = math.gcd(first, rest), f"dim {first}+{rest} | "
    words = [*_parts(draw, "token", sized.block_size), "block", *_parts(draw, "dim", part)]
    if draw(st.booleans()):
        words = [*_fused(draw, "slot", sized.block_size), *_parts(draw, "dim", part)]
    return replace(sized, text=prefix + " ".join(_grouped(draw, draw(st.permutations(words)))))


def _fused(draw: st.DrawFn, axes: str, innermost: int) -> list[str]:
    """Several axes read as one, whole or in two factors."""
    name = axes if axes == "slot" else f"({axes})"
    return [name] if not draw(st.booleans()) else [name + part[1:] for part in _factors(draw, "x", innermost)]


def _factors(draw: st.DrawFn, axis: str, size: int) -> list[str]:
    factor = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    return [f"{axis}/{factor}", f"{axis}%{factor}"]


def _parts(draw: st.DrawFn, axis: str, size: int) -> list[str]:
    if axis == "block" or not draw(st.booleans()):
        return [axis]
    return _factors(draw, axis, size)


def _grouped(draw: st.DrawFn, words: list[str]) -> list[str]:
    """Some adjacent words in one parenthesis."""
    if len(words) < 2 or any("(" in word for word in words) or not draw(st.booleans()):
        return list(words)
    first = draw(st.integers(0, len(words) - 2))
    last = draw(st.integers(first + 2, len(words)))
    return [*words[:first], f"({' '.join(words[first:last])})", *words[last:]]
