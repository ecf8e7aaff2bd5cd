"""Hypothesis strategies for layouts, block tables and ranges of tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st
from reference import addresses

from deeplink.kvconnector.layout import Bound, Layout
from deeplink.kvconnector.plan import Chunk

AXES = ("block", "head", "token", "dim")


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
        return addresses(self.text, self.sizes)


@st.composite
def layouts(draw: st.DrawFn, heads: int | None = None, dim: int | None = None, blocks: int | None = None) -> Sized:
    """Any layout the grammar allows, with sizes its factors divide."""
    sized = Sized(
        "",
        blocks or draw(st.integers(1, 5)),
        heads or draw(st.integers(1, 4)),
        draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16])),
        dim or draw(st.sampled_from([1, 2, 4, 6, 8])),
    )
    outer: list[str] = []
    if not draw(st.booleans()):
        for axis in AXES:
            outer += _parts(draw, axis, sized.sizes[axis])
        outer.append("kv")
        return replace(sized, text=" ".join(_grouped(draw, draw(st.permutations(outer)))))
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
    return replace(sized, text=" ".join([*words, f"(k: {k_text} | v: {v_text})"]))


@st.composite
def tables(draw: st.DrawFn, sized: Sized, most_tokens: int = 64) -> tuple[list[int], Chunk]:
    """Distinct blocks in any order, and a range of the tokens they hold."""
    order = draw(st.permutations(range(sized.blocks)))
    table = order[: draw(st.integers(1, sized.blocks))]
    held = len(table) * sized.block_size
    start = draw(st.integers(0, held - 1))
    return table, Chunk(start, draw(st.integers(start + 1, min(held, start + most_tokens))))


def _parts(draw: st.DrawFn, axis: str, size: int) -> list[str]:
    if axis == "block" or not draw(st.booleans()):
        return [axis]
    factor = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    return [f"{axis}/{factor}", f"{axis}%{factor}"]


def _grouped(draw: st.DrawFn, words: list[str]) -> list[str]:
    """Some adjacent words in one parenthesis."""
    if len(words) < 2 or not draw(st.booleans()):
        return list(words)
    first = draw(st.integers(0, len(words) - 2))
    last = draw(st.integers(first + 2, len(words)))
    return [*words[:first], f"({' '.join(words[first:last])})", *words[last:]]
