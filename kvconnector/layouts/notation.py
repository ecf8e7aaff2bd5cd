"""The text of a layout: its words, its grammar, and which axes it names in which order. See `layout` for the meaning.

Grammar:

    layout  = [tensors "|"] item {item}
    tensors = "kv" | "dim" n "+" n {"+" n}
    item    = axis [part] | "(" axis {axis} ")" [part] | "(" "k:" item {item} "|" "v:" item {item} ")"
    part    = "/" n | "%" n
    axis    = "block" | "kv" | "head" | "token" | "dim" | "slot"
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from deeplink.errors import LayoutError

AXES = ("block", "kv", "head", "token", "dim")
MAX_TEXT = 4096

_NAMES = (*AXES, "slot")
_SLOT = ("block", "token")
_WORD = re.compile(r"\s*(?:(k:|v:|[a-z]+|\))(?:([/%])([1-9][0-9]{0,8}))?|([(|]|[1-9][0-9]{0,8}(?:\+[1-9][0-9]{0,8})+))")

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
    """Adjacent axes an engine sees as one, and perhaps a factor of that one."""

    axes: tuple[Axis, ...]
    part: Part = ""
    factor: int = 1

    def __str__(self) -> str:
        return f"({' '.join(map(str, self.axes))}){f'{self.part}{self.factor}' if self.part else ''}"


@dataclass(frozen=True, slots=True)
class Split:
    """A run of K, then a run of V. Where K and V are separate tensors, the order in each."""

    k: tuple[Item, ...]
    v: tuple[Item, ...]

    def __str__(self) -> str:
        return f"(k: {' '.join(map(str, self.k))} | v: {' '.join(map(str, self.v))})"


Item = Axis | Fused | Split


@dataclass(frozen=True, slots=True)
class Tensors:
    """Which tensors a layer has: one (`by` is ""), one for K and one for V ("kv"), or one for each of `parts`
    elements of dim ("dim")."""

    by: Literal["", "kv", "dim"] = ""
    parts: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"dim {'+'.join(map(str, self.parts))}" if self.by == "dim" else self.by


ONE_TENSOR = Tensors()


def parse(text: str) -> tuple[Tensors, tuple[Item, ...]]:
    """Raises LayoutError naming the place in the text."""
    if len(text) > MAX_TEXT:
        raise LayoutError(f"a layout text of {len(text)} characters; the limit is {MAX_TEXT}")
    words = _Words(text)
    tensors = _tensors(words)
    items = tuple(_items(words, closing=None))
    _check_axes(tensors, items, text)
    return tensors, items


def flat(items: tuple[Item, ...], side: KV, split: bool = True) -> Iterator[Axis]:
    """The plain factors of one side, outermost first; `split` is false where a Split adds no kv axis of its own."""
    for item in items:
        if isinstance(item, Axis):
            yield from _expand((item.name,), item.part, item.factor)
        elif isinstance(item, Split):
            if split:
                yield Axis("kv")
            yield from flat(item.k if side == "k" else item.v, side)
        elif item.part:
            yield from _expand(tuple(axis.name for axis in item.axes), item.part, item.factor)
        else:
            yield from flat(item.axes, side)


def _expand(names: tuple[str, ...], part: Part, factor: int) -> Iterator[Axis]:
    """A factor of several axes read as one. As the number divides the innermost axis, it is a factor of that one,
    and the others belong to the quotient."""
    *outer, last = (name for fused in names for name in (_SLOT if fused == "slot" else (fused,)))
    if part != "%":
        yield from map(Axis, outer)
    yield Axis(last, part, factor)


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
            if word and name not in (*_NAMES, ")"):
                raise LayoutError(f"layout {text!r}: {name!r} cannot be factored at character {place}")
            self.words.append((place, name or mark, word, int(factor or 1)))
            position = match.end()
        self.next = 0

    def take(self) -> Word | None:
        if self.next == len(self.words):
            return None
        self.next += 1
        return self.words[self.next - 1]

    def peek(self, ahead: int = 0) -> str:
        return self.words[self.next + ahead][1] if self.next + ahead < len(self.words) else ""

    def taken(self) -> tuple[Part, int]:
        """The factor of the word just taken."""
        _, _, part, factor = self.words[self.next - 1]
        return part, factor

    def fail(self, what: str) -> LayoutError:
        at = self.words[self.next - 1][0] if self.next else 0
        return LayoutError(f"layout {self.text!r}: {what} at character {at}")


def _tensors(words: _Words) -> Tensors:
    if words.peek() == "kv" and words.peek(1) == "|":
        words.take()
        if words.taken() != ("", 1):
            raise words.fail("kv cannot be factored")
        words.take()
        return Tensors("kv")
    if words.peek() == "dim" and words.peek(1)[:1].isdigit() and words.peek(2) == "|":
        words.take()
        if words.taken() != ("", 1):
            raise words.fail("a dim in parts cannot be factored")
        parts = tuple(map(int, words.peek().split("+")))
        words.take()
        words.take()
        return Tensors("dim", parts)
    return ONE_TENSOR


Inside = Literal["", "fused", "split"]


def _items(words: _Words, closing: str | None, inside: Inside = "") -> Iterator[Item]:
    while (word := words.take()) is not None:
        _, name, part, factor = word
        if name == closing:
            return
        if name == "(":
            yield _parenthesis(words, inside)
        elif name in _NAMES:
            yield Axis(name, part, factor)
        else:
            raise words.fail(f"{name!r} is not an axis ({', '.join(_NAMES)})")
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
        part, factor = words.taken()
        if part and any(axis.part for axis in axes):
            raise words.fail("a factor of a factor")
        return Fused(axes, part, factor)
    if inside == "split":
        raise words.fail("(k: … | v: …) inside another")
    words.take()
    k = tuple(_items(words, "|", "split"))
    if words.peek() != "v:":
        raise words.fail("'v:' is missing")
    words.take()
    v = tuple(_items(words, ")", "split"))
    if words.taken() != ("", 1):
        raise words.fail("(k: … | v: …) cannot be factored")
    return Split(k, v)


def _check_axes(tensors: Tensors, items: tuple[Item, ...], text: str) -> None:
    for index, item in enumerate(items):
        if isinstance(item, Split) and index != len(items) - 1:
            raise LayoutError(f"layout {text!r}: (k: … | v: …) must come last")
    sides: tuple[KV, ...] = ("k", "v")
    for side in sides:
        parts: dict[str, list[Axis]] = {name: [] for name in AXES}
        for axis in flat(items, side, split=tensors.by != "kv"):
            parts[axis.name].append(axis)
        # A cache of one vector a token, the same for every head, has neither a kv nor a head axis.
        vector = tensors.by == "dim" or not (tensors.by or parts["kv"] or parts["head"])
        for name in ("kv", "head") if vector else ("kv",) if tensors.by else ():
            if parts.pop(name):
                raise LayoutError(f"layout {text!r}: {name} cannot appear after '{tensors} |'")
        for name, found in parts.items():
            if not _complete(found):
                shown = " ".join(map(str, found)) or "nothing"
                raise LayoutError(
                    f"layout {text!r}: {name} must appear once, or once as {name}/n and once as {name}%n "
                    f"({side} has {shown})"
                )
        for name in ("kv", "block"):
            if len(parts.get(name, "1")) != 1:
                raise LayoutError(f"layout {text!r}: {name} cannot be factored")


def _complete(found: list[Axis]) -> bool:
    """Whether these factors make up one axis: the whole of it, or its quotient and remainder by one number."""
    parts = sorted(axis.part for axis in found)
    return parts == [""] or (parts == ["%", "/"] and len({axis.factor for axis in found}) == 1)
