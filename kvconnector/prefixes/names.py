"""Names of cached prefixes that do not depend on an engine's page size.

Tokens are named in units of a few (16, say): a unit's name is a hash of its tokens and of the name of the unit before
it, so it stands for everything from the prompt's first token on. A page is whole units, and its name is that of its
last one. So pages of 16 tokens and of 64 end in names that they have in common, wherever a page of 64 ends.

Equal names mean equal tokens: SHA-256, and nobody who does not already know a prompt can find another with its name.
What else a cache depends on (the model, the element type) is not in a name but in the space that names are in.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

import numpy as np

from deeplink.errors import ConfigError

DIGEST = 32
"""Bytes of a name, which is written in hexadecimal."""
_TOKEN = np.dtype("<i8")


class PageName(str):
    """The name of a page's last unit, with those of all its units, in order; `units` is empty for the tokens after the
    last whole page, which are not stored.

    Engines keep names as text, cut lists of them and hand one back as the parent of the next; that is all they do.
    """

    __slots__ = ("units",)
    units: tuple[str, ...]

    def __new__(cls, name: str, units: tuple[str, ...] = ()) -> PageName:
        made = super().__new__(cls, name)
        made.units = units
        return made


def check_sizes(page: int, unit: int) -> None:
    """Raises ConfigError for pages that are not whole units."""
    if unit < 1 or page % unit:
        raise ConfigError(
            "a page is stored in whole units",
            field="unit",
            ours=f"{unit} tokens",
            theirs=f"a page size of {page}",
            remedy="give all engines that share the store a unit that divides every page size",
        )


def pages(tokens: Sequence[int], page: int, unit: int, parent: str | None = None) -> list[PageName]:
    """The names of all pages of `tokens`, and of what is left after the last whole one.

    `parent` is the name of the page before the first, or whatever else of 64 hexadecimal digits the prefix is to be
    told apart by; None at the prompt's beginning. Raises ConfigError for pages that are not whole units.
    """
    check_sizes(page, unit)
    before = bytes.fromhex(parent) if parent else _origin(unit)
    data = np.asarray(tokens, _TOKEN).tobytes()
    step, size = unit * _TOKEN.itemsize, page * _TOKEN.itemsize
    made: list[PageName] = []
    whole = len(data) // size * size
    for start in range(0, whole, size):
        units: list[str] = []
        for at in range(start, start + size, step):
            before = sha256(before + data[at : at + step]).digest()
            units.append(before.hex())
        made.append(PageName(units[-1], tuple(units)))
    if rest := data[whole:]:
        made.append(PageName(sha256(b"rest" + before + rest).hexdigest()))
    return made


def _origin(unit: int) -> bytes:
    return sha256(f"deeplink prefix in units of {unit}".encode()).digest()
