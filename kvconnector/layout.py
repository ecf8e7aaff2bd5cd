"""The layout notation: what the bytes of a KV cache mean.

A cache maps a logical element (kv, block, head, token, dim) to a place in memory, and for every engine known so
far that map is affine once axes are split into factors. So a layout is one line of text, outermost axis first:

    block token head (kv dim)                    K and V interleaved per token and head ("NHD")
    block head token (kv dim)                    the same, head-major ("HND")
    block head (k: dim token | v: token dim)     K transposed, V plain, one after the other

Grammar:

    layout  = item {item}
    item    = axis | axis "/" n | axis "%" n | "(" axis axis … ")" | "(" "k:" item {item} "|" "v:" item {item} ")"
    axis    = "block" | "kv" | "head" | "token" | "dim"

``token/16`` and ``token%16`` are the quotient and the remainder of the token's index, so the two together are the
axis. ``(kv dim)`` is two adjacent axes read as one by the engine; it means the same as ``kv dim``. ``(k: … | v: …)``
is a run of K followed by a run of V, each in its own order; it comes last. ``token`` counts inside a block.

`Layout.parse` reads the text, `str` prints it back, and `Layout.bind` turns it into strides once the sizes are known.
All strides and offsets are in elements, not bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from deeplink.errors import LayoutError

AXES = ("block", "kv", "head", "token", "dim")
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Element types this release moves, with their size in bytes."""

MAX_TEXT = 4096
_WORD = re.compile(r"\s*(?:(k:|v:|[a-z]+)(?:([/%])([1-9][0-9]{0,8}))?|([()|]))")

KV = Literal["k", "v"]
Part = Literal["", "/", "%"]


@dataclass(frozen=True, slots=True)
class Axis:
    """One factor of one axis: the whole of it, its quotient by `factor` ("/") or its remainder ("%")."""

    name: str
    part: Part = ""
    factor: int = 1

    def __str__(self) -> str:
        return f"{self.name}{self.part}{self.factor}" if self.part else self.name

    def extent(self, size: int) -> int:
        return {"": size, "/": size // self.factor, "%": self.factor}[self.part]

    @property
    def unit(self) -> int:
        """How far one step of this factor moves along the axis."""
        return self.factor if self.part == "/" else 1


@dataclass(frozen=True, slots=True)
class Fused:
    """Adjacent axes an engine sees as one."""

    axes: tuple[Axis, ...]

    def __str__(self) -> str:
        return f"({' '.join(map(str, self.axes))})"


@dataclass(frozen=True, slots=True)
class Split:
    """A run of K, then a run of V."""

    k: tuple[Item, ...]
    v: tuple[Item, ...]

    def __str__(self) -> str:
        return f"(k: {' '.join(map(str, self.k))} | v: {' '.join(map(str, self.v))})"


Item = Axis | Fused | Split


@dataclass(frozen=True, slots=True)
class Factor:
    """One dimension of a strided view: `extent` steps of `unit` along `axis`, each `stride` elements apart."""

    axis: str
    extent: int
    unit: int
    stride: int


@dataclass(frozen=True, slots=True)
class Strided:
    """Where K (or V) is: `offset` of logical element 0, then one factor per dimension, in canonical axis order
    (block, head, token…, dim…)."""

    offset: int
    factors: tuple[Factor, ...]

    def of(self, axis: str) -> tuple[Factor, ...]:
        return tuple(factor for factor in self.factors if factor.axis == axis)


@dataclass(frozen=True, slots=True)
class Bound:
    """A layout with sizes. `block_elements` is the size of one block, K and V together, in elements."""

    k: Strided
    v: Strided
    heads: int
    head_dim: int
    block_size: int
    blocks: int
    block_elements: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The parsed notation. Equal texts are equal layouts; different texts may still mean the same bytes."""

    items: tuple[Item, ...]

    @staticmethod
    def parse(text: str) -> Layout:
        """Raises LayoutError naming the place in the text."""
        if len(text) > MAX_TEXT:
            raise LayoutError(f"a layout text of {len(text)} characters; the limit is {MAX_TEXT}")
        words = _Words(text)
        items = tuple(_items(words, closing=None))
        layout = Layout(items)
        _check_axes(layout, text)
        return layout

    def __str__(self) -> str:
        return " ".join(map(str, self.items))

    def bind(self, *, heads: int, head_dim: int, block_size: int, blocks: int = 1) -> Bound:
        """Strides for these sizes. Raises LayoutError where a factor does not divide its axis."""
        sizes = {"block": blocks, "kv": 2, "head": heads, "token": block_size, "dim": head_dim}
        k, total = _side(self.items, "k", sizes, str(self))
        v, _ = _side(self.items, "v", sizes, str(self))
        return Bound(k, v, heads, head_dim, block_size, blocks, total // blocks)


Word = tuple[int, str, Part, int]


class _Words:
    """The text as words, with a place to point at."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.words: list[Word] = []
        position = 0
        while position < len(text.rstrip()):
            match = _WORD.match(text, position)
            if match is None:
                raise LayoutError(f"layout {text!r}: cannot read from character {position}: {text[position:][:20]!r}")
            name, part, factor, mark = match.groups()
            word: Part = "" if part is None else "/" if part == "/" else "%"
            place = match.start(1) if name else match.start(4)
            if word and name not in AXES:
                raise LayoutError(f"layout {text!r}: {name!r} cannot be factored at character {place}")
            self.words.append((place, name or mark, word, int(factor or 1)))
            position = match.end()
        self.next = 0

    def take(self) -> Word | None:
        if self.next == len(self.words):
            return None
        self.next += 1
        return self.words[self.next - 1]

    def peek(self) -> str:
        return self.words[self.next][1] if self.next < len(self.words) else ""

    def fail(self, what: str) -> LayoutError:
        at = self.words[self.next - 1][0] if self.next else 0
        return LayoutError(f"layout {self.text!r}: {what} at character {at}")


Inside = Literal["", "fused", "split"]


def _items(words: _Words, closing: str | None, inside: Inside = "") -> Iterator[Item]:
    while (word := words.take()) is not None:
        _, name, part, factor = word
        if name == closing:
            return
        if name == "(":
            yield _parenthesis(words, inside)
        elif name in AXES:
            yield Axis(name, part, factor)
        else:
            raise words.fail(f"{name!r} is not an axis ({', '.join(AXES)})")
    if closing is not None:
        raise words.fail(f"{closing!r} is missing")


def _parenthesis(words: _Words, inside: Inside) -> Item:
    # What does not nest is refused here, so a peer's text never decides how deep this recurses.
    if inside == "fused":
        raise words.fail("a parenthesis holds plain axes, or k: … | v: …; '(' inside another")
    if words.peek() != "k:":
        inner = tuple(_items(words, ")", "fused"))
        axes = tuple(item for item in inner if isinstance(item, Axis))
        if axes != inner or not axes:
            raise words.fail("a parenthesis holds plain axes, or k: … | v: …")
        return Fused(axes)
    if inside == "split":
        raise words.fail("(k: … | v: …) inside another")
    words.take()
    k = tuple(_items(words, "|", "split"))
    if words.peek() != "v:":
        raise words.fail("'v:' is missing")
    words.take()
    return Split(k, tuple(_items(words, ")", "split")))


def _flat(items: tuple[Item, ...], side: KV) -> Iterator[Axis]:
    for item in items:
        if isinstance(item, Axis):
            yield item
        elif isinstance(item, Fused):
            yield from item.axes
        else:
            yield Axis("kv")
            yield from _flat(item.k if side == "k" else item.v, side)


def _check_axes(layout: Layout, text: str) -> None:
    for index, item in enumerate(layout.items):
        if isinstance(item, Split) and index != len(layout.items) - 1:
            raise LayoutError(f"layout {text!r}: (k: … | v: …) must come last")
    for side in ("k", "v"):
        parts: dict[str, list[Axis]] = {name: [] for name in AXES}
        for axis in _flat(layout.items, side):
            parts[axis.name].append(axis)
        for name, found in parts.items():
            if not _complete(found):
                shown = " ".join(map(str, found)) or "nothing"
                raise LayoutError(
                    f"layout {text!r}: {name} must appear once, or once as {name}/n and once as {name}%n "
                    f"({side} has {shown})"
                )
        for name in ("kv", "block"):
            if len(parts[name]) != 1:
                raise LayoutError(f"layout {text!r}: {name} cannot be factored")


def _complete(found: list[Axis]) -> bool:
    """Whether these factors make up one axis: the whole of it, or its quotient and remainder by one number."""
    parts = sorted(axis.part for axis in found)
    return parts == [""] or (parts == ["%", "/"] and len({axis.factor for axis in found}) == 1)


def _side(items: tuple[Item, ...], side: KV, sizes: dict[str, int], text: str) -> tuple[Strided, int]:
    """Strides of one side, innermost outwards, and the number of elements of both sides together."""
    axes = list(_flat(items, side))
    stride, offset = 1, 0
    factors: list[Factor] = []
    for axis in reversed(axes):
        size = sizes[axis.name]
        if axis.part and size % axis.factor:
            raise LayoutError(f"layout {text!r}: {axis.name} has {size}, which {axis} does not divide")
        if axis.name == "kv":
            # K and V have equal sizes here, so wherever kv stands V is one run of its inner axes after K.
            offset = stride if side == "v" else 0
        else:
            factors.append(Factor(axis.name, axis.extent(size), axis.unit, stride))
        stride *= axis.extent(size)
    order = {name: place for place, name in enumerate(("block", "head", "token", "dim"))}
    # Of an axis the quotient first; by 1, quotient and remainder have one unit and only the extent tells them apart.
    factors.sort(key=lambda factor: (order[factor.axis], -factor.unit, -factor.extent))
    return Strided(offset, tuple(factors)), stride
