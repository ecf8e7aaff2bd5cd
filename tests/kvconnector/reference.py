"""Where an element is, computed one element at a time from the layout's text alone.

Independent of the strides in `deeplink.kvconnector.layout` on purpose: it walks the axes of the text as digits of a
mixed-radix number, so a mistake in the strided code cannot be made here too.
"""

from __future__ import annotations

import itertools
import re
from functools import lru_cache

import numpy as np


def address(text: str, side: str, at: dict[str, int], sizes: dict[str, int]) -> int:
    """Element offset of K or V (`side`) at block, head, token and dim, in a cache with these sizes."""
    index = 0
    values = {**at, "kv": int(side == "v")}
    extents = {**sizes, "kv": 2}
    for name, mark, n in _words(text, side):
        digit = {"": values[name], "/": values[name] // n, "%": values[name] % n}[mark]
        radix = {"": extents[name], "/": extents[name] // n, "%": n}[mark]
        index = index * radix + digit
    return index


def addresses(text: str, sizes: dict[str, int]) -> np.ndarray:
    """Every address of a cache, as ``[kv, block, head, token, dim]``."""
    shape = tuple(sizes[axis] for axis in ("block", "head", "token", "dim"))
    out = np.empty((2, *shape), np.int64)
    for place, side in enumerate("kv"):
        for at in itertools.product(*map(range, shape)):
            out[(place, *at)] = address(
                text, side, dict(zip(("block", "head", "token", "dim"), at, strict=True)), sizes
            )
    return out


@lru_cache
def _words(text: str, side: str) -> list[tuple[str, str, int]]:
    head, _, tail = text.partition("(k:")
    words = re.findall(r"[a-z]+(?:[/%]\d+)?", head)
    if tail:
        k, v = tail.rstrip(" )").split("|")
        words.append("kv")
        words += re.findall(r"[a-z]+(?:[/%]\d+)?", k if side == "k" else v.replace("v:", ""))
    parts = [re.fullmatch(r"([a-z]+)([/%]?)(\d*)", word).groups() for word in words]  # type: ignore[union-attr]
    return [(name, mark, int(factor or 1)) for name, mark, factor in parts]
