"""Where an element is, computed one element at a time from the layout's text alone.

Independent of the strides in `deeplink.kvconnector.layouts.layout` on purpose: it walks the axes of the text as digits
of a mixed-radix number, so a mistake in the strided code cannot be made here too. The tensors of one layer count as one
array here, one after the other.
"""

from __future__ import annotations

import itertools
import re
from functools import lru_cache

import numpy as np

AXES = ("block", "head", "token", "dim")
Word = tuple[tuple[str, ...], str, int]


def address(text: str, side: str, at: dict[str, int], sizes: dict[str, int]) -> int:
    """Element offset of K or V (`side`) at block, head, token and dim, in a cache with these sizes."""
    prefix, body = _prefix(text)
    values, extents, index = {**at, "kv": int(side == "v")}, {**sizes, "kv": 2}, 0
    before = 0
    if prefix == "kv":
        before = values["kv"] * sizes["block"] * sizes["head"] * sizes["token"] * sizes["dim"]
    elif prefix:
        for part in map(int, prefix.removeprefix("dim ").split("+")):
            extents["dim"] = part
            if values["dim"] < part:
                break
            values["dim"] -= part
            before += part * sizes["block"] * sizes["token"]
    for names, mark, n in _words(body, side, prefix == "kv"):
        value, extent = 0, 1
        for name in names:
            value, extent = value * extents[name] + values[name], extent * extents[name]
        digit = {"": value, "/": value // n, "%": value % n}[mark]
        index = index * {"": extent, "/": extent // n, "%": n}[mark] + digit
    return before + index


def sides(text: str) -> str:
    """ "kv", or "k" where the text names no kv."""
    return "kv" if re.search(r"kv|k:", text) else "k"


def tensor_sizes(text: str, sizes: dict[str, int]) -> list[int]:
    """Elements of each tensor of a layer."""
    prefix, _ = _prefix(text)
    one = sizes["block"] * sizes["head"] * sizes["token"]
    if prefix.startswith("dim"):
        return [one * int(part) for part in prefix.removeprefix("dim ").split("+")]
    whole = one * sizes["dim"]
    return [whole, whole] if prefix == "kv" else [whole * len(sides(text))]


def addresses(text: str, sizes: dict[str, int]) -> np.ndarray:
    """Every address of a cache, as ``[kv, block, head, token, dim]``."""
    shape = tuple(sizes[axis] for axis in AXES)
    out = np.empty((len(sides(text)), *shape), np.int64)
    for place, side in enumerate(sides(text)):
        for at in itertools.product(*map(range, shape)):
            out[(place, *at)] = address(text, side, dict(zip(AXES, at, strict=True)), sizes)
    return out


def _prefix(text: str) -> tuple[str, str]:
    found = re.match(r"(kv|dim [\d+]+) \| ", text)
    return (found[1], text[found.end() :]) if found else ("", text)


@lru_cache
def _words(body: str, side: str, separate: bool) -> list[Word]:
    head, _, tail = body.partition("(k:")
    words = _in_order(head)
    if tail:
        k, v = tail.rstrip(" ").removesuffix(")").split("|")
        words += [] if separate else [(("kv",), "", 1)]
        words += _in_order(k if side == "k" else v.replace("v:", ""))
    return words


def _in_order(text: str) -> list[Word]:
    words: list[Word] = []
    for inner, name, mark, n in re.findall(r"(?:\(([^)]*)\)|([a-z]+))(?:([/%])(\d+))?", text):
        if inner and not mark:
            words += _in_order(inner)
            continue
        names = tuple(re.sub(r"\bslot\b", "block token", inner or name).split())
        words.append((names, mark, int(n or 1)))
    return words
