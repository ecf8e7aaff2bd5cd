"""Where an element is, computed one element at a time from the layout's text alone.

Independent of the strides in `deeplink.kvconnector.layout` on purpose: it walks the axes of the text as digits of a
mixed-radix number, so a mistake in the strided code cannot be made here too.
"""

from __future__ import annotations

import re


def address(text: str, side: str, at: dict[str, int], sizes: dict[str, int]) -> int:
    """Element offset of K or V (`side`) at block, head, token and dim, in a cache with these sizes."""
    head, _, tail = text.partition("(k:")
    words = re.findall(r"[a-z]+(?:[/%]\d+)?", head)
    if tail:
        k, v = tail.rstrip(" )").split("|")
        words.append("kv")
        words += re.findall(r"[a-z]+(?:[/%]\d+)?", k if side == "k" else v.replace("v:", ""))
    index = 0
    values = {**at, "kv": int(side == "v")}
    extents = {**sizes, "kv": 2}
    for word in words:
        name, mark, factor = re.fullmatch(r"([a-z]+)([/%]?)(\d*)", word).groups()  # type: ignore[union-attr]
        n = int(factor or 1)
        digit = {"": values[name], "/": values[name] // n, "%": values[name] % n}[mark]
        radix = {"": extents[name], "/": extents[name] // n, "%": n}[mark]
        index = index * radix + digit
    return index
